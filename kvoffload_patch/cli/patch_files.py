"""Patch files for an installed vLLM: reading one, applying it to bytes, and writing the file.

A patch file is a zero-context unified diff that only adds lines at one place of one file, so that
no vLLM code is in it; the lines `# sha256 FILE RELEASED PATCHED` before the diff name every build
it is for. `patch -p1` and `git apply --unidiff-zero` take it too, but they apply zero-context hunks
by line number to whatever is there: the hashes are what makes it safe. Knows no release and looks
for nothing.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_HASHES = re.compile(r"# sha256 (vllm/[\w/]+\.py) ([0-9a-f]{64}) ([0-9a-f]{64})", re.ASCII)
_HUNK = re.compile(r"@@ -(\d{1,9}),0 \+(\d{1,9}),(\d{1,9}) @@", re.ASCII)


class BadPatchFile(Exception):
    """A patch file is not of the one form that is allowed; its fault, not vLLM's."""


@dataclass(frozen=True)
class FilePatch:
    """Lines that a file of vLLM gets.

    Attributes:
        path: of the file, as `vllm/...`.
        after: they come behind this line of the released file; 0 is its beginning.
        lines: what is added.
        patched_of: the sha256 that each known build's file has with them, by the one without.
    """

    path: str
    after: int
    lines: tuple[bytes, ...]
    patched_of: Mapping[str, str]

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
            raise BadPatchFile(f"the hunk for {self.path} does not give the hash in the header")
        return patched

    def revert(self, data: bytes) -> bytes:
        """The released file that was patched into `data`, verified by its hash."""
        lines = data.splitlines(keepends=True)
        del lines[self.after : self.after + len(self.lines)]
        released = b"".join(lines)
        if self.patched_of.get(sha256(released)) != sha256(data):
            raise BadPatchFile(f"the hunk for {self.path} does not give the hash in the header")
        return released

    def add_lines(self, data: bytes) -> bytes:
        """`data` with the lines added, whatever it is."""
        lines = data.splitlines(keepends=True)
        lines[self.after : self.after] = self.lines
        return b"".join(lines)


def sha256(data: bytes) -> str:
    """The hash that the headers of patch files use, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def parse(data: bytes) -> FilePatch:
    """What a patch file does.

    Raises:
        BadPatchFile: it is other than words, the hashes of one file, and a hunk that only adds.
    """
    try:
        lines = data.decode().splitlines()
    except UnicodeDecodeError:
        raise BadPatchFile("bytes that are no text") from None
    end = next((at for at, line in enumerate(lines) if not line.startswith("#")), len(lines))
    hashes = [found.groups() for found in map(_HASHES.fullmatch, lines[:end]) if found]
    paths = sorted({path for path, _, _ in hashes})
    if len(paths) != 1:
        raise BadPatchFile(f"hashes of {len(paths)} files")
    [path] = paths
    names, hunk, added = lines[end : end + 2], lines[end + 2 : end + 3], lines[end + 3 :]
    numbers = _HUNK.fullmatch("".join(hunk))
    if names != [f"--- a/{path}", f"+++ b/{path}"] or numbers is None:
        raise BadPatchFile(f"no hunk of {path} behind its hashes")
    after, first, count = map(int, numbers.groups())
    if not added or len(added) != count or not all(line.startswith("+") for line in added):
        raise BadPatchFile(f"a hunk of {path} that does other than add {count} lines")
    if first != after + 1:
        raise BadPatchFile(f"line numbers of the hunk of {path} that contradict each other")
    new = tuple(line[1:].encode() + b"\n" for line in added)
    return FilePatch(path, after, new, {released: patched for _, released, patched in hashes})


def write(path: Path, data: bytes) -> None:
    """Put a new file in the place of `path`, with its mode and, where that may be given, its owner.

    Never written in place: installers hard-link files from their caches, and another process may be
    reading it. Its bytecode goes first: most is outdated by the source's size and time, but some is
    compiled to be used unchecked.

    Raises:
        OSError: it could not be written, and is as it was; the error names it.
    """
    try:
        _replace(path, data)
    except OSError as error:
        error.filename = str(path)  # a disk that is full names none, and others what is gone
        raise


def _replace(path: Path, data: bytes) -> None:
    before = path.stat()
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with suppress(PermissionError):  # of another user, in a folder that both may write to
            os.chown(name, before.st_uid, before.st_gid)
        os.chmod(name, stat.S_IMODE(before.st_mode))
        for cached in _bytecode(path):
            cached.unlink()
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):  # as where a key came when it was in place already
            os.unlink(name)
        raise


def _bytecode(path: Path) -> Iterator[Path]:
    """Compiled forms of `path`, beside it and where PYTHONPYCACHEPREFIX has them."""
    elsewhere = Path(importlib.util.cache_from_source(str(path))).parent
    for folder in {path.parent / "__pycache__", elsewhere}:
        yield from sorted(folder.glob(f"{path.stem}.*.pyc"))
