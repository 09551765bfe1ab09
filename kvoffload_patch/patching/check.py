"""The decision: which points apply to a host version, and whether the host's source fits them.

Owns range selection, the comparison with source text, and the wording of these refusals. Must not
import the host; the same files and version therefore give the same answer in every process. The
same comparison serves once more for the live function, which others may have replaced.
"""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from .errors import PatchTableError, SignatureMismatch, UnreadableVersion, UnsupportedVersion
from .locate import find_source as find_installed_source
from .point import Decision, Host, PatchPoint

PROPERTIES = {"property", "cached_property", "functools.cached_property"}


def decide(
    host: Host,
    points: Sequence[PatchPoint],
    version: str,
    find_source: Callable[[str], Path] = find_installed_source,
) -> Decision:
    """Select the points for `version` and verify each against the host's source files.

    Args:
        host: the package to be patched.
        points: the whole table, all releases.
        version: the host's version as installed.
        find_source: gives a module's source file, or raises FileNotFoundError.

    Raises:
        UnreadableVersion: `version` is not a PEP 440 version.
        UnsupportedVersion: it lies outside `host.supported`.
        PatchTableError: a name is selected not at all or more than once.
        SignatureMismatch: targets differ from their points; the text lists all of them.
    """
    try:
        release = release_of(version)
    except InvalidVersion:
        raise UnreadableVersion(
            f"The version {version!r} of {host.name} cannot be read; {host.remedy}."
        ) from None
    if not SpecifierSet(host.supported).contains(release):
        raise UnsupportedVersion(
            f"{host.name} {version} is not supported (supported: {host.supported}); {host.remedy}."
        )
    selected = _select(points, release)
    trees = {module: _parse(module, find_source) for module in {p.module for p in selected}}
    complaints = [text for p in selected if (text := _complaint(p, trees[p.module]))]
    decision = Decision(host, version, selected)
    if complaints:
        raise mismatch(decision, complaints)
    return decision


def check_table(points: Sequence[PatchPoint], releases: Iterable[str]) -> None:
    """Check that every name in `points` is selected exactly once for each of `releases`.

    Raises:
        PatchTableError: naming every gap and overlap in the first release that has one.
    """
    for release in releases:
        _select(points, release_of(release))


def mismatch(decision: Decision, complaints: Sequence[str]) -> SignatureMismatch:
    """The refusal that lists `complaints`, one for each point of `decision` that differs."""
    return SignatureMismatch(
        f"{len(complaints)} of {len(decision.points)} patch points do not match {decision.label}: "
        f"{'; '.join(complaints)}. Nothing was patched; {decision.host.remedy}."
    )


def live_complaints(point: PatchPoint, target: Any) -> Iterator[str]:
    """At most one text: how the imported `target` differs from its source that was verified."""
    function = getattr(target, "__func__", target)  # the raw staticmethod or classmethod object
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # not a function, or one that tells nothing
        parameters = []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    wrong = _wrong_parameters(point, [p.name for p in parameters if p.kind not in variadic])
    if wrong:
        name = getattr(function, "__qualname__", type(function).__name__)
        origin = f"{getattr(function, '__module__', None)}.{name}"
        yield f"{point.name} {wrong} (the function is now {origin})"


def release_of(version: str) -> Version:
    """The release that a version is built from.

    Raises:
        InvalidVersion: it is not a PEP 440 version.
    """
    # PEP 440 puts 1.3rc1 neither in "<1.3" nor in ">=1.3", and local or post releases above their
    # release. All of them are built from the sources of that release, so they select like it.
    return Version(Version(version).base_version)


def _select(points: Sequence[PatchPoint], release: Version) -> tuple[PatchPoint, ...]:
    selected = tuple(p for p in points if SpecifierSet(p.versions).contains(release))
    counts = Counter(p.name for p in selected)
    targets = Counter(f"{p.module}:{p.attribute}" for p in selected)
    names = dict.fromkeys(p.name for p in points)
    problems = [f"{name} is selected {counts[name]} times" for name in names if counts[name] != 1]
    problems += [f"{target} has {n} points" for target, n in targets.items() if n > 1]
    if problems:
        raise PatchTableError(
            f"The patch table is wrong for release {release}, where every name must be selected "
            f"once: {'; '.join(problems)}."
        )
    return selected


def _parse(module: str, find_source: Callable[[str], Path]) -> ast.Module | str:
    """The module's syntax tree, or why there is none."""
    file = module.replace(".", "/") + ".py"
    try:
        return ast.parse(find_source(module).read_bytes())
    except FileNotFoundError:
        return f"not found: there is no {file}"
    except (SyntaxError, ValueError):
        return f"not found: {file} cannot be parsed"


def _complaint(point: PatchPoint, tree: ast.Module | str) -> str:
    """How the target differs from `point`, beginning with its name, or ""."""
    if isinstance(tree, str):
        return "" if point.absent else f"{point.name} {tree}"
    function = find_def(point.attribute, tree)
    if point.absent:
        return f"{point.name} exists, expected none" if function else ""
    if function is None:
        return f"{point.name} not found in {point.module.replace('.', '/')}.py"
    if PROPERTIES.intersection(map(ast.unparse, function.decorator_list)):
        return f"{point.name} is a property, expected a function"
    arguments = function.args
    named = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    parameters = _wrong_parameters(point, [argument.arg for argument in named])
    differences = [text for text in (parameters, _wrong_return(point, function)) if text]
    return f"{point.name} {' and '.join(differences)}" if differences else ""


def find_def(attribute: str, tree: ast.Module) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The function at a dotted path; base classes are followed within the module only."""
    *classes, name = attribute.split(".")
    scopes: list[ast.AST] = [tree]
    for class_name in classes:
        found = [node for scope in scopes for node in _definitions(scope, class_name)]
        scopes = list(found[-1:])
    for scope in scopes:  # grows while it is walked
        for node in reversed(list(_definitions(scope, name))):
            return None if isinstance(node, ast.ClassDef) else node
        for base in getattr(scope, "bases", ()):
            parents = _definitions(tree, ast.unparse(base))
            scopes.extend(node for node in parents if node not in scopes)
    return None


def _definitions(
    scope: ast.AST, name: str
) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Definitions of `name` in a module or class body, in order, also under if, try and with."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if node.name == name:
                yield node
        elif isinstance(node, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            yield from _definitions(node, name)


def _wrong_parameters(point: PatchPoint, found: Sequence[str]) -> str:
    if tuple(found[: len(point.parameters)]) == point.parameters:
        return ""
    return f"takes ({', '.join(found)}), expected ({', '.join(point.parameters)})"


def _wrong_return(point: PatchPoint, function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    found = ast.unparse(function.returns) if function.returns else ""
    if point.returns is None or _bare(found) in map(_bare, point.returns):
        return ""
    expected = " or ".join(f"'{text}'" for text in point.returns)
    return f"returns '{found.strip(chr(39))}', expected {expected}"


def _bare(annotation: str) -> str:
    # Quotes only delay evaluation, and text within them keeps the author's spacing.
    text = ast.unparse(ast.parse(annotation, mode="eval")) if annotation else ""
    return "".join(text.replace('"', "").replace("'", "").split())
