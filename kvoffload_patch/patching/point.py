"""Plain data: the host, the patch points, and the outcome of deciding.

Owns the fields and the checks that need nothing but the fields. Must not read files, import the
host, or know how a point is installed.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from .errors import PatchTableError
from .records import Records

Place = Literal["class", "object"]


@dataclass(frozen=True)
class Attributes:
    """What the host's objects of one class must have, for one range of host releases.

    Attributes:
        module: dotted module in which the class is defined, or into which it is imported.
        owner: the class; "" for the module itself.
        names: attributes, properties and methods.
        versions: PEP 440 specifiers. A name that is listed for other releases only must be absent.
    """

    module: str
    owner: str
    names: tuple[str, ...]
    versions: str

    @property
    def label(self) -> str:
        """What messages call the owner."""
        return self.owner or self.module


@dataclass(frozen=True)
class Host:
    """The package to be patched.

    Attributes:
        name: what to call it in messages.
        distributions: distribution names to look for; the first one installed counts.
        package: its top-level import name.
        supported: PEP 440 specifiers of the releases that may be patched at all.
        remedy: what the user can do about a refusal, a sentence without a full stop.
        attributes: what hooks read and set of its objects, all releases.
        records: releases that were verified, with digests; None: neither is compared.
        own_builds: regular expression of local versions under which it is released unchanged.
        override: what the user can do to patch something that was not verified.
    """

    name: str
    distributions: tuple[str, ...]
    package: str
    supported: str
    remedy: str
    attributes: tuple[Attributes, ...] = ()
    records: Records | None = None
    own_builds: str = ""
    override: str = ""

    def is_own_build(self, local: str | None) -> bool:
        """Whether a local version (the part behind "+") is one of the host's own."""
        return local is None or re.fullmatch(self.own_builds, local) is not None


@dataclass(frozen=True)
class PatchPoint:
    """One host function to wrap, for one range of host releases.

    Attributes:
        name: identity across releases; several points may share it if their ranges are disjoint.
        module: dotted module that defines the target.
        attribute: "function" or "Class.method" within that module.
        hook: "package.module:function". Loaded at install, so its module must not import the
            target module at its top level. Empty: the target is only checked, because hooks call
            it or stand in for it.
        versions: PEP 440 specifiers, compared with the release part of the host's version.
        parameters: names of the leading parameters, in order, with self; every one without a
            default is listed, and each can be given by position and by name.
        returns: accepted source texts of the return annotation ("" is none); None skips the check.
        why: why the patch exists.
        absent: these releases must not have the target; one that has it is not understood.
        on: "class": the target is replaced when its module is imported, and the hook is called as
            hook(wrapped, instance, args, kwargs). "object": it is left alone, and `ObjectHooks`
            sets what hook(wrapped, live, ...) makes on single objects.
        exact: the target has no parameters besides, because the host calls what stands in for it.
        wrappers: top-level packages whose decorators the host's source puts around the target.
        aliased: modules from which the host's source, under some settings, takes what it puts under
            the target's name.

    Raises:
        PatchTableError: a field cannot be understood.
    """

    name: str
    module: str
    attribute: str
    hook: str
    versions: str
    parameters: tuple[str, ...]
    returns: tuple[str, ...] | None
    why: str
    absent: bool = False
    on: Place = "class"
    exact: bool = False
    wrappers: tuple[str, ...] = ()
    aliased: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        try:
            SpecifierSet(self.versions)
            for text in self.returns or ():
                ast.parse(text or "None", mode="eval")
        except (InvalidSpecifier, SyntaxError) as error:
            raise PatchTableError(f"Patch point {self.name}: {error}.") from error
        if self.hook and (self.absent or self.hook.count(":") != 1):
            raise PatchTableError(
                f"Patch point {self.name}: hook {self.hook!r} is not 'package.module:function', "
                "or its target is absent."
            )

    @property
    def target(self) -> str:
        """What identifies the target: "module:attribute"."""
        return f"{self.module}:{self.attribute}"


@dataclass(frozen=True)
class Decision:
    """Permission to install: the verified points for the host version found.

    Attributes:
        doubts: what was found unverified and is patched because the user wants it.
        allow_unverified: whether the user wants it.
    """

    host: Host
    version: str
    points: tuple[PatchPoint, ...]
    doubts: tuple[str, ...] = ()
    allow_unverified: bool = False

    @property
    def wrapped(self) -> tuple[PatchPoint, ...]:
        """The points that are installed when their module is imported."""
        return tuple(point for point in self.points if point.hook and point.on == "class")

    @property
    def set_on_objects(self) -> tuple[PatchPoint, ...]:
        """The points that are installed on single objects; the rest are only checked."""
        return tuple(point for point in self.points if point.hook and point.on == "object")

    @property
    def label(self) -> str:
        """The host and its version, as messages name them."""
        return f"{self.host.name} {self.version}"
