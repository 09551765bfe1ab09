"""How the table of patch points is written down: a name, what it is for, and a shape per era."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from kvoffload_patch.patching import PatchPoint
from kvoffload_patch.patching.point import Place

HOOKS = "kvoffload_patch.integration"


class Shape(NamedTuple):
    """What a target looks like in a range of releases.

    Attributes:
        versions: PEP 440 specifiers.
        parameters: leading ones, all without a default included; None: there is no target.
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
    name: str,
    target: tuple[str, str],
    hook: str,
    why: str,
    *shapes: Shape,
    on: Place = "class",
    exact: bool = False,
    wrappers: tuple[str, ...] = (),
    aliased: tuple[str, ...] = (),
) -> tuple[PatchPoint, ...]:
    """The points of one name.

    Args:
        name: identity across releases.
        target: (module, attribute).
        hook: "module:function" beside this module, or "".
        why: why the point exists.
        shapes: one for each era.
        on: as in `PatchPoint`.
        exact: as in `PatchPoint`.
        wrappers, aliased: as in `PatchPoint`.
    """
    return tuple(
        replace(
            _point(name, shape.target or target, hook, why, shape),
            on=on,
            exact=exact,
            wrappers=wrappers,
            aliased=aliased,
        )
        for shape in shapes
    )


def _point(name: str, target: tuple[str, str], hook: str, why: str, shape: Shape) -> PatchPoint:
    absent = shape.parameters is None
    own = hook if shape.hook is None else shape.hook
    return PatchPoint(
        name=name,
        module=target[0],
        attribute=target[1],
        hook=f"{HOOKS}.{own}" if own and not absent else "",
        versions=shape.versions,
        parameters=shape.parameters or (),
        returns=None if absent else (shape.returns,),
        why=why,
        absent=absent,
    )
