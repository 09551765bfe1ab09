"""Imported functions against their points: others may have replaced what the sources define.

Owns this one comparison, at the time when a target is about to be wrapped or stood in for.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import SourceFileLoader
from types import CodeType, FunctionType, ModuleType
from typing import Any

from .check import mismatch, unverified, wrong_parameters
from .locate import find_source
from .point import Decision, PatchPoint

logger = logging.getLogger(__name__)

_NONE = ModuleType("none")
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_live(decision: Decision, targets: Iterable[tuple[PatchPoint, ModuleType, Any]]) -> None:
    """Compare imported targets with their points.

    What is another's, and is taken because the decision allows it, is said in the log.

    Args:
        decision: what the points were selected by.
        targets: each point, its imported module, and the raw object in the class or module.

    Raises:
        SignatureMismatch: a target is no plain function, or has other parameters.
        UnverifiedHost: a target is not the function that the module's source defines.
    """
    complaints, doubts, files = [], [], dict[str, Any]()
    for point, module, target in targets:
        complaints += [f"{point.name} {text}" for text in _wrong(point, target)]
        doubts += [f"{point.name} {text}" for text in _foreign(point, module, target, files)]
    if complaints:
        raise mismatch(decision, complaints)
    if doubts and not decision.allow_unverified:
        raise unverified(decision, doubts)
    for doubt in doubts:
        logger.warning(
            "%s is patched all the same: %s; compare what it does with the unpatched one.",
            decision.label,
            doubt,
        )


def _wrong(point: PatchPoint, target: Any) -> Iterator[str]:
    """At most one text."""
    for kind, name in ((staticmethod, "a static method"), (classmethod, "a class method")):
        if isinstance(target, kind):
            yield f"is {name}, expected a plain function"
            return
    if inspect.iscoroutinefunction(inspect.unwrap(target) if callable(target) else target):
        yield "is a coroutine function, expected a plain function"
        return
    try:
        found = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):  # not a function, or one that tells nothing
        yield f"is a {type(target).__name__} that does not tell its parameters"
        return
    named = [p for p in found if p.kind not in _VARIADIC]
    plain = [p.name for p in named if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    required = [p.name for p in named if p.default is inspect.Parameter.empty]
    text = wrong_parameters(point, plain, [p.name for p in named], required)
    if text:
        yield f"{text} (it is now {_origin(target)})"


def _foreign(
    point: PatchPoint, module: ModuleType, target: Any, files: dict[str, Any]
) -> Iterator[str]:
    """At most one text.

    A function knows the module in which it was defined by its globals, which copying a name or a
    docstring onto a wrapper leaves as they are. Others can execute code with these globals, or
    give the function another code, so that is compared with what the source compiles to.

    Args:
        point: the point.
        module: imported.
        target: the raw object in the class or module.
        files: compiled sources by module, which are added to.
    """
    names = [module.__name__, *point.aliased]
    homes = [vars(sys.modules[name]) for name in names if name in sys.modules]
    # Not isinstance: proxies answer for what they wrap.
    while type(target) is FunctionType and not _is_at_home(target, homes):
        package = str(target.__globals__.get("__name__")).partition(".")[0]
        if package not in point.wrappers or not hasattr(target, "__wrapped__"):
            break
        target = target.__wrapped__
    if type(target) is not FunctionType or not _is_at_home(target, homes):
        yield f"was replaced by {_origin(target)}"
        return
    name = next(name for name in names if vars(sys.modules.get(name, _NONE)) is target.__globals__)
    if name not in files:
        files[name] = _compiled(name)
    if target.__code__ not in _defined(point.attribute, files[name]):
        code = target.__code__
        yield f"was replaced by {_origin(target)} of {code.co_filename}:{code.co_firstlineno}"


def _compiled(module: str) -> CodeType | None:
    """What a module's file defines, mostly from Python's own cache; None if there is no file."""
    try:
        return SourceFileLoader(module, str(find_source(module))).get_code(module)
    except (ImportError, OSError, SyntaxError):
        return None


def _defined(attribute: str, code: CodeType | None) -> list[CodeType]:
    """Functions at a dotted path, or those of that name in other classes, which it may inherit."""
    *owners, name = attribute.split(".")
    scopes = [code] if code else []
    for owner in owners:
        scopes = [each for scope in scopes for each in _within(scope) if each.co_name == owner]
    found = [each for scope in scopes for each in _within(scope) if each.co_name == name]
    if not found and owners and code:
        found = [f for cls in _within(code) for f in _within(cls) if f.co_name == name]
    return found


def _within(scope: CodeType) -> list[CodeType]:
    return [value for value in scope.co_consts if isinstance(value, CodeType)]


def _is_at_home(target: FunctionType, homes: Iterable[dict[str, Any]]) -> bool:
    return any(target.__globals__ is home for home in homes)


def _origin(target: Any) -> str:
    if type(target) is not FunctionType:
        kind = type(target)
        return f"a {kind.__module__}.{kind.__qualname__}"
    code = target.__code__
    return f"{target.__globals__.get('__name__')}.{getattr(code, 'co_qualname', code.co_name)}"
