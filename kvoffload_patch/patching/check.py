"""The decision: which points apply to a host version, and whether the host's source fits them.

Owns range selection, the comparison with source text and records, and the wording of refusals. Must
not import the host; the same files and version therefore give the same answer in every process.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from . import digest
from .errors import (
    PatchTableError,
    SignatureMismatch,
    UnreadableVersion,
    UnsupportedVersion,
    UnverifiedHost,
)
from .locate import find_source as find_installed_source
from .point import Attributes, Decision, Host, PatchPoint
from .sources import Function, SourceNotFound, Sources, file_of, find_def, find_later

# Decorators behind which a method is no plain function of its instance.
OTHER_KINDS = {
    "property": "a property",
    "cached_property": "a property",
    "functools.cached_property": "a property",
    "staticmethod": "a static method",
    "classmethod": "a class method",
}


def decide(
    host: Host,
    points: Sequence[PatchPoint],
    version: str,
    find_source: Callable[[str], Path] = find_installed_source,
    allow_unverified: bool = False,
) -> Decision:
    """Select the points for `version` and verify each against the host's source files.

    Args:
        host: the package to be patched.
        points: the whole table, all releases.
        version: the host's version as installed.
        find_source: gives a module's source file, or raises FileNotFoundError.
        allow_unverified: take releases and function bodies that were not verified, too. Targets,
            parameters and attributes must be there in any case.

    Raises:
        UnreadableVersion: `version` is not a PEP 440 version.
        UnsupportedVersion: it lies outside `host.supported`.
        UnverifiedHost: it was not verified, or a body differs from what was.
        PatchTableError: a name is selected not at all or more than once.
        SignatureMismatch: something differs from the table; the text says what, for the first.
    """
    release = _release(host, version, allow_unverified)
    label = f"{host.name} {version}"
    doubts = list(_release_doubts(host, version, release))
    if doubts and not allow_unverified:
        raise _unverified(host, label, doubts)
    selected = select(points, release)
    sources = Sources(find_source)
    if doubts or not _is_released(host, points, release, sources):
        complaints = differences(host, release, selected, sources)
        if complaints:
            raise mismatch(Decision(host, version, selected), complaints)
        doubts += _changed_bodies(host, release, selected, sources)
        if doubts and not allow_unverified:
            raise _unverified(host, label, doubts)
    return Decision(host, version, selected, tuple(doubts), allow_unverified)


def differences(
    host: Host, release: Version, selected: Iterable[PatchPoint], sources: Sources
) -> list[str]:
    """How sources differ from the points of a release and from what its objects must have."""
    return [*_complaints(selected, sources), *_missing(host, release, sources)]


def mismatch(decision: Decision, complaints: Sequence[str]) -> SignatureMismatch:
    """The refusal for what differs from the points of `decision`."""
    return SignatureMismatch(
        f"{decision.label} does not match the patch table: {_first(complaints)}. "
        f"Nothing was patched; {decision.host.remedy}."
    )


def unverified(decision: Decision, doubts: Sequence[str]) -> UnverifiedHost:
    """The refusal for what was not verified."""
    return _unverified(decision.host, decision.label, doubts)


def fingerprint(host: Host, points: Sequence[PatchPoint]) -> str:
    """Changes with whatever is compared with sources."""
    compared = [
        (p.name, p.module, p.attribute, p.versions, p.parameters, p.returns, p.absent, p.exact)
        for p in points
    ]
    return digest.of_file(repr((compared, host.attributes)).encode())


def release_of(version: str) -> Version:
    """The release that a version is built from.

    Raises:
        InvalidVersion: it is not a PEP 440 version.
    """
    # PEP 440 puts 1.3rc1 neither in "<1.3" nor in ">=1.3", and local or post releases above their
    # release. Rows of the table mean the release in all these cases.
    return Version(Version(version).base_version)


def bodies(selected: Iterable[PatchPoint], sources: Sources) -> dict[str, str]:
    """The digest of each target's definition, by "module:attribute".

    Raises:
        SourceNotFound: a module is not there.
    """
    found: dict[str, str] = {}
    for point in selected:
        function = None if point.absent else find_def(point.attribute, sources.tree(point.module))
        if function is not None:
            found[point.target] = digest.of_function(function)
    return found


def _release(host: Host, version: str, allow_unverified: bool) -> Version:
    try:
        release = release_of(version)
    except InvalidVersion:
        raise UnreadableVersion(
            f"The version {version!r} of {host.name} cannot be read; {host.remedy}."
        ) from None
    if not SpecifierSet(host.supported).contains(release):
        reach = f"; {host.override or 'that'} reaches {host.supported} only" * allow_unverified
        raise UnsupportedVersion(
            f"{host.name} {version} is not supported (supported: {_span(host)}{reach}); "
            f"install one of these, or {host.remedy}."
        )
    return release


def _span(host: Host) -> str:
    known = host.records.releases if host.records else ()
    return f"{known[0]} to {known[-1]}" if known else host.supported


def _release_doubts(host: Host, version: str, release: Version) -> Iterator[str]:
    if host.records is None:
        return
    full = Version(version)
    known = {Version(known) for known in host.records.releases}
    # A development version counts as one before a release.
    unread = full.is_prerelease and full.public not in host.records.candidates
    if release not in known or unread:
        yield f"this release is not one of those verified ({_span(host)})"
    elif not host.is_own_build(full.local):
        yield f"'+{full.local}' is not a build of {host.name}'s own"


def _unverified(host: Host, label: str, doubts: Sequence[str]) -> UnverifiedHost:
    return UnverifiedHost(
        f"{label} is refused: {_first(doubts)}. Nothing was patched; {host.remedy}, or "
        f"{host.override or 'allow it'} to patch it all the same."
    )


def _first(texts: Sequence[str]) -> str:
    return texts[0] + (f" (and {len(texts) - 1} more)" if len(texts) > 1 else "")


def select(points: Sequence[PatchPoint], release: Version) -> tuple[PatchPoint, ...]:
    """The points of a release.

    Raises:
        PatchTableError: a name is selected not at all or more than once.
    """
    selected = tuple(p for p in points if SpecifierSet(p.versions).contains(release))
    counts = Counter(p.name for p in selected)
    targets = Counter(p.target for p in selected)
    names = dict.fromkeys(p.name for p in points)
    problems = [f"{name} is selected {counts[name]} times" for name in names if counts[name] != 1]
    problems += [f"{target} has {n} points" for target, n in targets.items() if n > 1]
    if problems:
        raise PatchTableError(
            f"The patch table is wrong for release {release}, where every name must be selected "
            f"once: {'; '.join(problems)}."
        )
    return selected


def _is_released(
    host: Host, points: Sequence[PatchPoint], release: Version, sources: Sources
) -> bool:
    """Whether every file is, byte for byte, one that was compared with this table before."""
    records = host.records
    if records is None or records.table != fingerprint(host, points):
        return False
    known = records.files_of(records.nearest(release))
    return bool(known) and all(
        digest.of_file(sources.read(module)) in digests for module, digests in known.items()
    )


def _complaints(selected: Iterable[PatchPoint], sources: Sources) -> Iterator[str]:
    for point in selected:
        try:
            tree = sources.tree(point.module)
            function = find_def(point.attribute, tree)
            text = _complaint(point, function)
            later = find_later(point.attribute, tree, function) if function and not text else ""
            if later:
                text = f"may be replaced by '{later}' in {file_of(point.module)}, expected nothing"
        except SourceNotFound as reason:
            text = "" if point.absent else str(reason)
        if text:
            yield f"{point.name} {text}"


def _complaint(point: PatchPoint, function: Function | None) -> str:
    """How a target differs from its point, or ""."""
    if point.absent:
        return "exists, expected none" if function else ""
    if function is None:
        return f"not found in {file_of(point.module)}"
    kinds = [OTHER_KINDS.get(ast.unparse(d)) for d in function.decorator_list]
    kinds += ["a coroutine function"] if isinstance(function, ast.AsyncFunctionDef) else []
    for kind in filter(None, kinds):
        return f"is {kind}, expected a plain function"
    wrong = (wrong_parameters(point, *_parameters(function.args)), _wrong_return(point, function))
    return " and ".join(filter(None, wrong))


def _parameters(arguments: ast.arguments) -> tuple[list[str], list[str], list[str]]:
    """A header's parameters that are plain, in order; all by name; those without a default."""
    positional = [*arguments.posonlyargs, *arguments.args]
    optional = positional[len(positional) - len(arguments.defaults) :]
    optional += [a for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults) if default]
    named = [*positional, *arguments.kwonlyargs]
    required = [a.arg for a in named if a not in optional]
    plain = [] if arguments.posonlyargs else [a.arg for a in arguments.args]
    return plain, [a.arg for a in named], required


def wrong_parameters(
    point: PatchPoint, plain: Sequence[str], named: Sequence[str], required: Sequence[str]
) -> str:
    """How parameters differ from those of a point, or "".

    Args:
        point: the point.
        plain: parameters that can be given by position and by name, in order.
        named: all but those of * and **.
        required: those of them without a default.
    """
    listed = point.parameters
    if tuple(plain[: len(listed)]) != listed:
        return f"takes ({', '.join(named)}), expected ({', '.join(listed)})"
    more = [name for name in (named if point.exact else required) if name not in listed]
    if more:
        kind = "parameter" if point.exact else "required parameter"
        return f"has the {kind} {more[0]}, expected only ({', '.join(listed)})"
    return ""


def _wrong_return(point: PatchPoint, function: Function) -> str:
    found = ast.unparse(function.returns) if function.returns else ""
    if point.returns is None or _bare(found) in map(_bare, point.returns):
        return ""
    expected = " or ".join(f"'{text}'" for text in point.returns)
    return f"returns '{found.strip(chr(39))}', expected {expected}"


def _bare(annotation: str) -> str:
    # Quotes only delay evaluation, and text within them keeps the author's spacing.
    text = ast.unparse(ast.parse(annotation, mode="eval")) if annotation else ""
    return "".join(text.replace('"', "").replace("'", "").split())


def _missing(host: Host, release: Version, sources: Sources) -> Iterator[str]:
    """Attributes that are not there, or are there where the table has none."""
    rows = host.attributes
    now = [row for row in rows if SpecifierSet(row.versions).contains(release)]
    for module, owner in dict.fromkeys((row.module, row.owner) for row in now):
        mine = [row for row in rows if (row.module, row.owner) == (module, owner)]
        expected = {name for row in mine if row in now for name in row.names}
        try:
            found = sources.attributes(module, owner)
        except SourceNotFound as reason:
            yield f"{owner or module} {reason}"
            continue
        if found is None:
            yield f"{owner} not found in {file_of(module)}"
            continue
        yield from _differences(mine[0], expected, found, mine)


def _differences(
    of: Attributes, expected: set[str], found: set[str], rows: Sequence[Attributes]
) -> Iterator[str]:
    for name in sorted(expected - found):
        yield f"{of.label}.{name} not found in {file_of(of.module)}"
    elsewhere = {name for row in rows for name in row.names}
    for name in sorted((elsewhere - expected) & found):
        yield f"{of.label}.{name} exists, expected none"


def _changed_bodies(
    host: Host, release: Version, selected: Sequence[PatchPoint], sources: Sources
) -> Iterator[str]:
    if host.records is None:
        return
    known = host.records.nearest(release)
    digests = host.records.bodies_of(known)
    found = bodies(selected, sources)
    for point in selected:
        if point.target in found and found[point.target] not in digests.get(point.target, ()):
            yield f"{point.name} ({point.attribute}) is not what {known} has"
