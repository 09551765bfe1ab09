"""Patch files for an installed vLLM: reading them, applying them to bytes, and writing all or none.

A patch file is a zero-context unified diff that only adds lines, so that no vLLM code is in it; the
lines `# sha256 FILE RELEASED PATCHED` before the diff name every build it is for. `patch -p1` and
`git apply --unidiff-zero` take it too, but they apply zero-context hunks by line number to whatever
is there: the hashes are what makes it safe. Knows no release and looks for nothing.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_HASHES = re.compile(r"# sha256 (vllm/[\w/]+\.py) ([0-9a-f]{64}) ([0-9a-f]{64})", re.ASCII)
_HUNK = re.compile(r"@@ -(\d{1,9}),0 \+(\d{1,9}),(\d{1,9}) @@", re.ASCII)


class BadPatchFile(Exception):
    """A patch file is not of the one form that is allowed; its fault, not vLLM's."""


@dataclass(frozen=True)
class Hunk:
    """Lines to add behind line `after` of the released file; 0 is its beginning."""

    after: int
    lines: tuple[bytes, ...]


@dataclass
class FilePatch:
    """What one file of vLLM gets; `patched_of` maps the sha256 of each known build's file."""

    path: str
    patched_of: dict[str, str] = field(default_factory=dict)
    hunks: list[Hunk] = field(default_factory=list)

    def state(self, data: bytes) -> str:
        """What `data` is: "released", "patched", or "unknown"."""
        found = sha256(data)
        if found in self.patched_of:
            return "released"
        return "patched" if found in self.patched_of.values() else "unknown"

    def apply(self, data: bytes) -> bytes:
        """The released `data` with the lines added, verified by its hash."""
        patched = self.add_lines(data)
        if sha256(patched) != self.patched_of[sha256(data)]:
            raise BadPatchFile(f"the hunks for {self.path} do not give the hash in the header")
        return patched

    def revert(self, data: bytes) -> bytes:
        """The released file that was patched into `data`, verified by its hash."""
        lines = data.splitlines(keepends=True)
        for hunk in self.hunks:  # those before it are gone already
            del lines[hunk.after : hunk.after + len(hunk.lines)]
        released = b"".join(lines)
        if self.patched_of.get(sha256(released)) != sha256(data):
            raise BadPatchFile(f"the hunks for {self.path} do not give the hash in the header")
        return released

    def add_lines(self, data: bytes) -> bytes:
        """`data` with the lines of every hunk added, whatever it is."""
        lines = data.splitlines(keepends=True)
        for hunk in reversed(self.hunks):
            lines[hunk.after : hunk.after] = hunk.lines
        return b"".join(lines)


def sha256(data: bytes) -> str:
    """The hash that the headers of patch files use, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def parse(data: bytes) -> list[FilePatch]:
    """The files that a patch file changes, in its order.

    Raises:
        BadPatchFile: something in it is not a header, a hash, or a hunk that only adds.
    """
    try:
        lines = iter(data.decode().splitlines())
    except UnicodeDecodeError:
        raise BadPatchFile("bytes that are no text") from None
    known: dict[str, dict[str, str]] = {}
    patches: list[FilePatch] = []
    for line in lines:
        hashes, hunk = _HASHES.fullmatch(line), _HUNK.fullmatch(line)
        if hashes and not patches:
            path, released, patched = hashes.groups()
            known.setdefault(path, {})[released] = patched
        elif line.startswith("--- a/"):
            path = line[len("--- a/") :]
            if path not in known or next(lines, "") != f"+++ b/{path}":
                raise BadPatchFile(f"no hashes for {path!r}, or its two header lines differ")
            patches.append(FilePatch(path, known.pop(path)))
        elif hunk and patches:
            patches[-1].hunks.append(_hunk(patches[-1], [int(n) for n in hunk.groups()], lines))
        elif patches or not line.startswith("#"):
            raise BadPatchFile(f"unexpected line {line!r}")
    if known or not patches or not all(patch.hunks for patch in patches):
        raise BadPatchFile("a file without hunks")
    return patches


def _hunk(patch: FilePatch, numbers: list[int], lines: Iterator[str]) -> Hunk:
    after, first, count = numbers
    added = [line for _, line in zip(range(count), lines)]  # in this order it takes no line more
    if not added or len(added) != count or not all(line.startswith("+") for line in added):
        raise BadPatchFile(f"a hunk of {patch.path} does other than add {count} lines")
    earlier = sum(len(hunk.lines) for hunk in patch.hunks)
    in_order = not patch.hunks or patch.hunks[-1].after < after
    if first != after + earlier + 1 or not in_order:
        raise BadPatchFile(f"the line numbers of a hunk of {patch.path} contradict each other")
    return Hunk(after, tuple(line[1:].encode() + b"\n" for line in added))


def write_all(changes: Mapping[Path, tuple[bytes, bytes]]) -> None:
    """Replace each file, given as (what it holds, what it is to hold), or leave all as they are.

    Raises:
        OSError: the file that it names could not be written; those before it have their old
            contents again.
    """
    done: list[Path] = []
    try:
        for path, (_, new) in changes.items():
            _replace(path, new)
            done.append(path)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename = str(path)  # a disk that is full names none, and others what is gone
        for written in done:
            _replace(written, changes[written][0])
        raise


def _replace(path: Path, data: bytes) -> None:
    """Put a new file in the place of `path`, with its mode.

    Never written in place: installers hard-link files from their caches, and another process may be
    reading it. Its bytecode goes first: most is outdated by the source's size and time, but some is
    compiled to be used unchecked.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode)
        for cached in _bytecode(path):
            cached.unlink()
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _bytecode(path: Path) -> Iterator[Path]:
    """Compiled forms of `path`, beside it and where PYTHONPYCACHEPREFIX has them."""
    elsewhere = Path(importlib.util.cache_from_source(str(path))).parent
    for folder in {path.parent / "__pycache__", elsewhere}:
        yield from sorted(folder.glob(f"{path.stem}.*.pyc"))
