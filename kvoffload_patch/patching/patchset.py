"""Installing decided points and taking them off again, all of them or none.

Owns the state, the journal of replaced attributes, and the post-import hooks. Must not choose
points or know what a hook does. Not covered: a target module that is reloaded, or imported again
after it was deleted from sys.modules, defines new and therefore unpatched objects, none of
them among `installed`.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

from .check import mismatch
from .errors import InstallFailed, PatchRefused, PatchTableError
from .live import check_live
from .point import Decision, PatchPoint

# "armed" means that some target module is still to be imported.
State = Literal["idle", "armed", "installed", "failed", "removed"]
# Called with the refusal for each import that goes on in spite of it.
OnRefusal = Callable[[PatchRefused], None]

_ABSENT = object()


@dataclass
class _Entry:
    """One replaced attribute: what was in the owner's own __dict__, and what is there now."""

    point: PatchPoint
    owner: Any
    attribute: str
    original: Any
    wrapper: Any

    def restore(self) -> None:
        if vars(self.owner).get(self.attribute) is not self.wrapper:
            return  # wrapped or replaced by others; the closed gate makes ours a pass-through
        if self.original is _ABSENT:
            delattr(self.owner, self.attribute)
        else:
            setattr(self.owner, self.attribute, self.original)


@dataclass
class _Record:
    """What this process knows about one host package, shared by all its patch sets."""

    decision: Decision
    state: State = "idle"
    refusal: PatchRefused | None = None
    journal: list[_Entry] = field(default_factory=list)
    # The truth value of this list opens and closes all wrappers: wrapt tests a list in C, where a
    # callable would cost a Python call each time. Every arm() makes a new one, so that a wrapper
    # that had to stay in place never comes back to life beneath its successor.
    gate: list[bool] = field(default_factory=list)
    on_refusal: OnRefusal | None = None
    kept: bool = False

    def take_off(self, state: State) -> None:
        self.gate.clear()
        while self.journal:
            with suppress(Exception):  # where its owner forbids it, the closed gate has to do
                self.journal.pop().restore()
        self.state = state

    def fail(self, refusal: PatchRefused) -> None:
        """Refuse from now on, and take everything off that is not in use."""
        if self.kept:
            self.state = "failed"
        else:
            self.take_off("failed")
        self.refusal = self.refusal or _copy(refusal)


_records: dict[str, _Record] = {}
_lock = threading.RLock()  # never held while importing: a thread may wait for it in an import
# A fork waits for the lock, or the child could inherit it locked by a thread that it lacks.
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)


class PatchSet:
    """Installs and removes the points of one decision.

    All patch sets of a host package in a process share one state: arming any is arming all.
    """

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        self._arming: int | None = None  # the thread that does
        with _lock:
            self._record = _records.setdefault(decision.host.package, _Record(decision))

    def arm(self, on_refusal: OnRefusal | None = None) -> None:
        """Install at once in modules already imported, and in the others after their import.

        Does nothing when armed already. What fails here is raised, and nothing stays installed.

        Args:
            on_refusal: called if a module that is imported later cannot be patched, when every
                original object is back, and again for each further one; the imports go on, and
                none is patched. None: they raise the refusal, until `remove` is called.

        Raises:
            PatchTableError: the host is armed with other points.
            SignatureMismatch: a live function has been replaced by one with other parameters.
            UnverifiedHost: a live function is not the one that its module's source defines.
            InstallFailed: a hook or target could not be loaded or replaced, or the target module
                is just being imported by the calling thread.
        """
        record, decision = self._record, self.decision
        load_wrapt()
        modules = list(dict.fromkeys(point.module for point in decision.wrapped))
        for name in modules:
            _finish_loading(decision, name)
        with _lock:
            if record.refusal is not None:
                raise _copy(record.refusal)
            if self.enabled():
                if record.decision.points != decision.points:
                    raise PatchTableError(f"{decision.label} is armed with other points already.")
                return
            record.decision, record.state = decision, "armed"
            record.gate, record.on_refusal, record.kept = [True], on_refusal, False
        self._register(modules)

    def keep(self) -> str:
        """What is installed is in use: it stays, also when a module imported later is refused.

        Returns:
            Why nothing may be put to use; empty if it may.
        """
        with _lock:
            refusal = self._record.refusal
            self._record.kept = self._record.kept or refusal is None
        return "" if refusal is None else str(refusal)

    def give_up(self, refusal: PatchRefused) -> None:
        """Another host that this one goes with was refused, and so is this."""
        with _lock:
            self._record.fail(refusal)

    def remove(self) -> None:
        """Put every original object back, newest first; later imports stay untouched.

        A wrapper that others have wrapped stays in place and only passes calls through.
        """
        with _lock:
            self._record.refusal = None
            if self._record.state != "idle":
                self._record.take_off("removed")

    def enabled(self) -> bool:
        """Whether hooks run wherever their target module has been imported."""
        return self._record.state in ("armed", "installed")

    def installed(self) -> set[tuple[Any, str]]:
        """Class and attribute of each point: not of one that a reload has made under its name."""
        with _lock:
            return {(entry.owner, entry.attribute) for entry in self._record.journal}

    def status(self) -> dict[str, Any]:
        """State, refusal text or None, and the names of the points that are installed."""
        record = self._record
        with _lock:
            return {
                "state": record.state,
                "refusal": str(record.refusal) if record.refusal else None,
                "installed": [entry.point.name for entry in record.journal],
            }

    def _register(self, modules: Sequence[str]) -> None:
        """Have each module patched; a hook left from an earlier arm() finds it installed."""
        record, self._arming = self._record, threading.get_ident()
        try:
            for name in modules:
                load_wrapt().register_post_import_hook(self._on_import, name)
        except BaseException:
            with _lock:
                if record.refusal is None:  # interrupted: a part of the modules would stay armed
                    record.take_off("removed")
            raise
        finally:
            self._arming = None

    def _on_import(self, module: ModuleType) -> None:
        """Post-import hook: install, or refuse this and every later import of `module`."""
        record = self._record
        try:
            if record.refusal is not None:
                raise _copy(record.refusal)
            if self.enabled():
                _install(record, module)
        except BaseException as error:
            # While this thread arms, the refusal is that of `arm`; an interrupt is none.
            if record.on_refusal and record.refusal and self._arming != threading.get_ident():
                record.on_refusal(_copy(record.refusal))
                if isinstance(error, Exception):
                    return
            if _is_loading(module):
                # wrapt forgets a hook that raised, and registers another only for a module that
                # is not in sys.modules; the failing import would take it out in any case.
                sys.modules.pop(module.__name__, None)
                load_wrapt().register_post_import_hook(self._on_import, module.__name__)
            raise


def _install(record: _Record, module: ModuleType) -> None:
    """Install the points of `module`; on any exception take off everything and refuse."""
    gate, decision, name = record.gate, record.decision, module.__name__
    points = [point for point in decision.wrapped if point.module == name]
    try:
        hooks = [load_hook(point) for point in points]
        with _lock:
            if not gate or gate is not record.gate:
                return  # removed or armed again meanwhile
            if any(entry.point.module == name for entry in record.journal):
                return  # installed by another hook, from an earlier arm() or in another thread
            for entry in _prepare(record, module, dict(zip(points, hooks))):
                record.journal.append(entry)
                setattr(entry.owner, entry.attribute, entry.wrapper)
            if len(record.journal) == len(decision.wrapped):
                record.state = "installed"
    except BaseException as error:
        with _lock:
            refusal = _refusal(record, name, error)
            record.fail(refusal)
        if refusal is error or not isinstance(error, Exception):
            raise
        raise refusal from error


def _refusal(record: _Record, module: str, error: BaseException) -> PatchRefused:
    """What is said of an error while points of `module` were installed: itself, or a sentence."""
    decision, kept = record.decision, record.kept
    if isinstance(error, PatchRefused) and not kept:
        return error
    own = "reinstall kvoffload_patch, or " * isinstance(error, ImportError)
    stays = "What is in use already stays patched" if kept else "Nothing stays patched"
    return InstallFailed(
        f"{decision.label} cannot be patched: installing in {module} raised "
        f"{type(error).__name__} ({_text(error)}). {stays}; {own}{decision.host.remedy}."
    )


def _text(error: BaseException) -> str:
    with suppress(Exception):  # another package's may fail to say what it is
        return str(error)
    return "without a text"


def _prepare(
    record: _Record, module: ModuleType, hooks: dict[PatchPoint, Callable[..., Any]]
) -> list[_Entry]:
    """Resolve every target, compare it with its point, and build all wrappers; assign nothing."""
    entries = []
    for point, hook in hooks.items():
        try:
            owner, attribute, target = load_wrapt().resolve_path(module, point.attribute)
        except AttributeError:
            text = f"{point.name} not found in the imported {module.__name__}"
            raise mismatch(record.decision, [text]) from None
        wrapper = load_wrapt().FunctionWrapper(target, hook, record.gate)
        original = vars(owner).get(attribute, _ABSENT)
        entries.append((_Entry(point, owner, attribute, original, wrapper), target))
    check_live(record.decision, [(entry.point, module, target) for entry, target in entries])
    return [entry for entry, _ in entries]


def load_hook(point: PatchPoint) -> Callable[..., Any]:
    """The function that a point names as its hook."""
    module, _, function = point.hook.partition(":")
    hook: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return hook


def _finish_loading(decision: Decision, name: str) -> None:
    """Wait for an import of module `name` in another thread; refuse if it is in this one."""
    if _is_loading(sys.modules.get(name)):
        importlib.import_module(name)
        if _is_loading(sys.modules.get(name)):
            raise InstallFailed(
                f"{decision.label} cannot be patched while {name} is being imported. "
                f"Nothing was patched; {decision.host.remedy}."
            )


def _is_loading(module: ModuleType | None) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _copy(refusal: PatchRefused) -> PatchRefused:
    # One exception object raised again and again would collect tracebacks and keep frames alive.
    return type(refusal)(*refusal.args)


def load_wrapt() -> Any:
    """What installing rests on, when it is needed: deciding must not pay the 50 ms."""
    return importlib.import_module("wrapt")
