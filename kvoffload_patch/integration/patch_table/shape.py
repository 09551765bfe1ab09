"""How the table of patch points is written down: a name, what it is for, and a shape per era."""

from __future__ import annotations

from typing import NamedTuple

from kvoffload_patch.patching import PatchPoint
from kvoffload_patch.patching.point import Place, Role

HOOKS = "kvoffload_patch.integration"
UPSTREAM = "vLLM offers a tier below its prefix cache without taking the connector slot"


class Shape(NamedTuple):
    """What a target looks like in a range of releases.

    Attributes:
        versions: PEP 440 specifiers.
        parameters: leading ones; None: the target does not exist.
        returns: source of the return annotation.
        hook: in place of the row's own; "" only checks the target.
        target: (module, attribute) in place of the row's own.
    """

    versions: str
    parameters: tuple[str, ...] | None
    returns: str = ""
    hook: str | None = None
    target: tuple[str, str] | None = None


def row(
    role: Role,
    name: str,
    target: tuple[str, str],
    hook: str,
    why: str,
    *shapes: Shape,
    on: Place = "class",
) -> tuple[PatchPoint, ...]:
    """The points of one name; ``hook`` is "module:function" beside this module, or ""."""
    return tuple(_point(role, name, target, hook, why, shape, on) for shape in shapes)


def _point(
    role: Role,
    name: str,
    target: tuple[str, str],
    hook: str,
    why: str,
    shape: Shape,
    on: Place,
) -> PatchPoint:
    absent = shape.parameters is None
    own = hook if shape.hook is None else shape.hook
    module, attribute = shape.target or target
    return PatchPoint(
        name=name,
        role=role,
        module=module,
        attribute=attribute,
        hook=f"{HOOKS}.{own}" if own and not absent else "",
        versions=shape.versions,
        parameters=shape.parameters or (),
        returns=None if absent else (shape.returns,),
        why=why,
        remove_when=UPSTREAM,
        absent=absent,
        on=on,
    )
