"""What every way to switch on ends in: a small import hook that arms when vLLM is first imported.

The start-up file runs in every Python process of an environment, pip included. So `main` only puts
one finder on `sys.meta_path`; reading the settings, the decision and the patches wait until `vllm`
itself is executed. A process without vLLM, or one that only asks whether vLLM is there, notices
nothing. Imports at module level must stay this few: they are part of every interpreter start.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType, TracebackType
    from typing import Any

FLAG = "KVOFFLOAD_ENABLE"
TRUE = ("1", "true", "yes", "on")  # `config` has the same; these are read if it cannot be imported
FALSE = ("0", "false", "no", "off")
TARGET = "vllm"
WITHOUT = " vLLM runs without the CPU tier."


class Refused(ImportError):
    """`import vllm` was refused; the text is the one sentence that says why."""


class _State:
    """What this process decided; a decision is made once."""

    armed = False
    hooked = False
    refusal: Exception | None = None


def main() -> None:
    """Register the import hook if the flag is set at all; a second call does nothing."""
    if os.environ.get(FLAG) and not any(isinstance(f, VLLMFinder) for f in sys.meta_path):
        sys.meta_path.insert(0, VLLMFinder())


def plugin() -> None:
    """vLLM's plugin entry point: arm now if the switch is on and nothing else did."""
    if os.environ.get(FLAG):
        arm_for_import()


def enable() -> None:
    """Switch on for this process and its children, and arm now; raise a refusal if strict."""
    os.environ[FLAG] = "1"
    main()
    _decide()
    if _State.refusal is not None and is_strict():
        raise _State.refusal


def arm_for_import() -> None:
    """Arm if the switches say so; if strict, a refusal is an ImportError each time."""
    _decide()
    if _State.refusal is not None and is_strict():
        _say_it_once()
        raise Refused(with_name(sentence(_State.refusal)), name=TARGET)


def _say_it_once() -> None:
    """A program that ends of a refusal, which has been said, ends with status 2 and says no more.

    A program that catches the error notices nothing, and a prompt shows it as any other.
    """
    if _State.hooked:
        return
    _State.hooked = True
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        if isinstance(error, Refused) and not hasattr(sys, "ps1"):
            raise SystemExit(2)
        before(kind, error, at)

    sys.excepthook = hook


def is_strict() -> bool:
    """Whether a refusal aborts; a value that cannot be read counts as strict."""
    return _word("KVOFFLOAD_STRICT") not in FALSE


def _word(name: str) -> str:
    return os.environ.get(name, "").strip().lower()


def _decide() -> None:
    """Make the decision, unless it was made; print a refusal, once.

    Every module of ours is imported within the `try`: a damaged package is a refusal like others.
    """
    if _State.armed or _State.refusal is not None:
        return
    try:
        from kvoffload_patch import launch_token

        launch_token.confirm(launch_token.DECIDED)
        if _word("KVOFFLOAD_DISABLE") in TRUE:
            return
        from kvoffload_patch import config

        if not config.is_enabled():
            return
        from kvoffload_patch.memory import check_capacity, settings_that

        settings_that(check_capacity)
        from kvoffload_patch.integration import install

        install.arm()
    except Exception as error:  # noqa: BLE001 - whatever went wrong, vLLM must not run half patched
        _State.refusal = error
        outcome = "" if is_strict() else WITHOUT
        say(with_name(sentence(error)) + outcome)
    else:
        _State.armed = True


def status() -> dict[str, object]:
    """See `kvoffload_patch.status`."""
    import kvoffload_patch
    from kvoffload_patch import config

    found: dict[str, object] = {"release": None, "supported": None, "points": []}
    enabled = False
    refusal = None if _State.refusal is None else sentence(_State.refusal)
    try:
        from kvoffload_patch.integration import install
        from kvoffload_patch.memory import MemoryRefused, check_capacity, settings_that

        refusal = refusal or install.refusal() or None
        settings, _ = config.Settings.of_what_is_right()
        enabled = settings.enable and not settings.disable
        found.update(install.describe(settings))
        try:
            settings_that(check_capacity)
        except (config.ConfigError, MemoryRefused) as error:  # beside what is wrong with vLLM
            others = "" if found["verdict"] == "ok" else f" {found['verdict']}"
            found["verdict"] = f"{error}{others}"
    except Exception as error:  # noqa: BLE001 - a report has to say what is wrong, not fail of it
        found["verdict"] = sentence(error)
    armed = _State.armed and refusal is None
    own = {"version": kvoffload_patch.__version__, "enabled": enabled, "armed": armed}
    return {**own, "refusal": refusal, **found}


def say(line: str) -> None:
    """Say it on standard error, if there is one that takes it.

    A log that is full, closed or read by nobody does not decide what is served, or how that ends.
    """
    stream = sys.stderr  # None: closed from the first, and `print` would take standard output
    try:
        if stream is not None:
            print(line, file=stream, flush=True)
    except (OSError, ValueError):
        pass


def sentence(error: Exception) -> str:
    """One sentence for the user: a refusal's own words, or what an unexpected error was."""
    if isinstance(error, (ImportError, SyntaxError)):
        return (
            f"the package or one of its requirements cannot be imported by {sys.executable}"
            f" ({error}); reinstall kvoffload_patch with its dependencies there."
        )
    if isinstance(error, _refusals()):
        return str(error)
    return (
        f"arming failed unexpectedly with {type(error).__name__}: {error};"
        " set KVOFFLOAD_DISABLE=1 to run without the CPU tier, and report this."
    )


def _refusals() -> tuple[type[Exception], ...]:
    """The exceptions whose text is the sentence, as far as they can be imported."""
    found: list[type[Exception]] = []
    try:
        from kvoffload_patch.config import ConfigError

        found.append(ConfigError)
        from kvoffload_patch.patching.errors import PatchRefused

        found.append(PatchRefused)
    except Exception:  # noqa: BLE001 - a damaged file can raise anything
        pass
    return tuple(found)


def with_name(text: str) -> str:
    """A sentence with our name before it, settings called as the user has given them."""
    prefix = "kvoffload_patch: "
    try:
        from kvoffload_patch.config import as_given

        text = as_given(text)
    except Exception:  # noqa: BLE001 - a damaged file can raise anything
        pass
    return text if text.startswith(prefix) else prefix + text


class VLLMFinder:
    """Meta path finder for `vllm` alone: finds it as usual, then puts `_ArmingLoader` in front."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != TARGET:
            return None
        spec = self._ask_others(path, target)
        if spec is None or spec.loader is None:  # not installed, or a folder without a package
            return None
        spec.loader = _ArmingLoader(spec.loader)  # type: ignore[assignment]
        return spec

    def _ask_others(
        self, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None
            if finder is not self and find_spec is not None:
                spec = find_spec(TARGET, path, target)
            if spec is not None:
                return spec
        return None


class _ArmingLoader:
    """Arms when the module is executed, so that looking for vLLM is not yet importing it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        arm_for_import()
        self._loader.exec_module(module)
