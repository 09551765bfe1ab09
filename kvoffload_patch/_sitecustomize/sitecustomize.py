"""Start-up code for Pythons that have no start-up file: this folder is put on PYTHONPATH.

Keep this file small; what it does lies in `kvoffload_patch._bootstrap`. Another Python's libraries
may not fit the one that runs, so the package is found by its own folder and nothing beside it is.
Python imports one `sitecustomize` only, so the one that this file shadows is run here. Its failure
is not caught: it takes the same way out as it would without this file.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_OFF, _ON = ("0", "false", "no", "off"), ("1", "true", "yes", "on")


def _arm() -> None:
    """Run the start-up code; a package that cannot be imported blocks `vllm` if strict."""
    if _word("KVOFFLOAD_ENABLE") in ("", *_OFF):
        return
    try:
        _find_package()
        from kvoffload_patch._bootstrap import main

        main()
    except Exception as error:  # noqa: BLE001 - a damaged file can raise anything
        sys.meta_path.insert(0, _Blocker(error))


def _word(name: str) -> str:
    return os.environ.get(name, "").strip().lower()


def _find_package() -> None:
    """Make `kvoffload_patch` importable from the folder above, unless this Python has its own."""
    found = importlib.util.find_spec("kvoffload_patch")
    if found is None or found.origin is None:  # none, or a folder without __init__.py
        sys.meta_path.append(_PackageFinder())


class _PackageFinder:
    """Finds this one package by its folder, whose neighbours stay out of reach."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "kvoffload_patch":
            return None
        folder = os.path.dirname(_HERE)
        init = os.path.join(folder, "__init__.py")
        return importlib.util.spec_from_file_location(
            name, init, submodule_search_locations=[folder]
        )


class _Blocker:
    """Refuses `vllm` when it is executed, as the start-up file does without the package."""

    def __init__(self, error: Exception) -> None:
        self._text = (
            f"kvoffload_patch: the package cannot be imported by {sys.executable} ({error});"
            " reinstall it there, or remove its _sitecustomize from PYTHONPATH."
        )

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        others = [f for f in sys.meta_path if f is not self and hasattr(f, "find_spec")]
        specs = (f.find_spec(name, path, target) for f in others if name == "vllm")
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            self._block_before(spec.loader)
        return spec

    def _block_before(self, loader: Any) -> None:
        run = loader.exec_module

        def exec_module(module: object) -> None:
            self._block()
            run(module)

        loader.exec_module = exec_module

    def _block(self) -> None:
        if _word("KVOFFLOAD_DISABLE") in _ON:
            return
        if _word("KVOFFLOAD_STRICT") not in _OFF:
            raise ImportError(self._text, name="vllm")
        stream, text = sys.stderr, self._text + " vLLM runs without the CPU tier."
        try:  # as `_bootstrap.say` does
            if stream is not None:
                print(text, file=stream, flush=True)
        except (OSError, ValueError):
            pass


def _run_shadowed() -> None:
    """Run the next `sitecustomize` on sys.path in this one's place, and leave sys.path to it."""
    folders = [os.path.abspath(entry) for entry in sys.path]
    following = sys.path[folders.index(_HERE) + 1 :] if _HERE in folders else sys.path[:]
    sys.path[:] = [e for e, folder in zip(sys.path, folders) if folder != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", following)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_arm()
_run_shadowed()
