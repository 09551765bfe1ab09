"""Hooks on single objects: set while something is attached to them, taken off when it is not.

Owns the check of the functions that an object has at that moment, and the attributes that it sets.
The classes keep their own functions, so objects to which nothing is attached pay nothing. Must not
know what a hook does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from .check import mismatch
from .errors import PatchTableError
from .live import check_live
from .patchset import load_hook
from .point import Decision, PatchPoint


class ObjectHooks:
    """The points of one decision on one set of objects.

    A point without a hook is checked like the others where its object is among them.

    Args:
        decision: its points with ``on="object"`` are to be set.
        owners: the object for the name of each class.

    Attributes:
        live: true while the hooks are set. One that others have wrapped meanwhile stays in its
            place and calls on, which it knows by this: a list, because Python tests one faster
            than it calls a function.

    Raises:
        SignatureMismatch: an object's function is not the one whose source was verified: set on
            the object itself, or overridden in a derived class; or has other parameters.
        UnverifiedHost: the class's function is not the one that its module's source defines.
        PatchTableError: a point has no object.
    """

    def __init__(self, decision: Decision, owners: Mapping[str, Any]) -> None:
        self.live: list[bool] = []
        self._set: list[tuple[Any, str, Any]] = []
        self._targets = [(p, _owner(p, owners)) for p in decision.set_on_objects]
        checked = [(p, owner) for p, owner in _present(decision, owners) if not p.absent]
        complaints = [text for p, owner in checked for text in _complaints(p, owner)]
        if complaints:
            raise mismatch(decision, complaints)
        check_live(decision, [(p, sys.modules[p.module], _function(p, o)) for p, o in checked])

    def install(self, *context: Any) -> None:
        """Set every hook: what ``hook(wrapped, live, *context)`` makes; on any exception none.

        ``wrapped`` is the object's method as it is now.
        """
        self.live.append(True)
        try:
            for point, owner in self._targets:
                name = point.attribute.rpartition(".")[2]
                made = load_hook(point)(getattr(owner, name), self.live, *context)
                setattr(owner, name, made)
                self._set.append((owner, name, made))
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Take every hook off, newest first; does nothing if none is set."""
        self.live.clear()
        while self._set:
            owner, name, made = self._set.pop()
            if getattr(owner, name, None) is made:
                delattr(owner, name)


def is_set_on(owner: Any, name: str) -> bool:
    """Whether an object has an attribute of its own in place of its class's.

    Not by its ``__dict__``: CPython 3.11 keeps attributes beside an object until that is asked for
    once, and finds them more slowly ever after, which tells where a step asks for them
    hundreds of times.
    """
    classes = [vars(c) for c in type(owner).__mro__ if name in vars(c)]
    if not classes:
        return hasattr(owner, name)
    as_defined = classes[0][name]
    bind = getattr(as_defined, "__get__", None)
    expected = as_defined if bind is None else bind(owner, type(owner))
    return bool(getattr(owner, name) != expected)


def _owner(point: PatchPoint, owners: Mapping[str, Any]) -> Any:
    class_name = point.attribute.rpartition(".")[0]
    if class_name not in owners:
        raise PatchTableError(f"Patch point {point.name}: there is no object for {class_name}.")
    return owners[class_name]


def _present(decision: Decision, owners: Mapping[str, Any]) -> Iterator[tuple[PatchPoint, Any]]:
    for point in decision.points:
        class_name = point.attribute.rpartition(".")[0]
        if class_name in owners:
            yield point, owners[class_name]


def _complaints(point: PatchPoint, owner: Any) -> Iterator[str]:
    """At most one text: how an object's function differs from the one whose source was verified."""
    class_name, _, name = point.attribute.rpartition(".")
    kind = type(owner)
    if is_set_on(owner, name):
        yield f"{point.name} is set on the {kind.__name__} itself by others"
        return
    classes = kind.__mro__
    known = [c for c in classes if (c.__module__, c.__qualname__) == (point.module, class_name)]
    if not known:
        yield f"{point.name} expects a {class_name}, found {kind.__module__}.{kind.__qualname__}"
        return
    if name not in dir(kind):
        yield f"{point.name} not found in {kind.__module__}.{kind.__qualname__}"
        return
    defined = next(c for c in classes if name in vars(c))
    if defined not in known[0].__mro__:
        yield f"{point.name} is overridden in {defined.__module__}.{defined.__qualname__}"


def _function(point: PatchPoint, owner: Any) -> Any:
    """The raw object in the class that defines it."""
    name = point.attribute.rpartition(".")[2]
    return next(vars(c)[name] for c in type(owner).__mro__ if name in vars(c))
