"""Files in memory that the ranks of a host map together: what each has, and slots in common.

The engine makes a file that has no name (`memfd_create`), and the ranks open it through the
engine's own entry in /proc, which only processes of the same user in the same container can. Not in
/dev/shm: a container has 64 MiB there, and a name stays if the engine is killed before it takes it
away. When all have opened it the engine closes it, and the memory is gone with the last rank,
however that ends. What /proc calls it begins with the engine's pid: a file is told from those of
other engines also when its own has ended.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class SharedFileAddress:
    """Where a file is that ranks have in common.

    Attributes:
        path: of the file, in the engine's /proc.
        name: what a link to it reads; another machine may have another file at that path.
        ranks: that map it, in the order of their cells or slots.
    """

    path: str
    name: str
    ranks: tuple[int, ...]

    def is_reachable(self) -> bool:
        """Whether this process can open it; not from another machine, container or user."""
        with suppress(OSError):
            return os.readlink(self.path) == self.name and os.access(self.path, os.R_OK | os.W_OK)
        return False

    def open(self) -> int:
        """A file descriptor of this process.

        Raises:
            OSError: it cannot be opened here, or is another file.
        """
        file = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.readlink(f"/proc/self/fd/{file}") != self.name:
                raise OSError(f"expected {self.name} at {self.path}, found another file")
        except BaseException:
            os.close(file)
            raise
        return file


class SharedFile:
    """The engine's side: the file, until every rank has opened it.

    Args:
        ranks: that map it.

    Raises:
        OSError, AttributeError: this system has no such files.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        name = f"kvoffload-{os.getpid()}-{secrets.token_hex(8)}"
        self._file = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.fchmod(self._file, 0o600)
            # By this process's own entry: where /proc is that of another PID namespace, the number
            # is another process's, whose file no rank must take for this one.
            named = os.readlink(f"/proc/self/fd/{self._file}")
        except BaseException:
            self.close()
            raise
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.address = SharedFileAddress(path, named, tuple(ranks))

    def resize(self, nbytes: int) -> None:
        """Make it so long; it holds no page until one is touched."""
        os.ftruncate(self._file, nbytes)

    def write(self, content: bytes) -> None:
        """What it holds from its beginning on.

        Raises:
            OSError: there is no memory for it.
        """
        os.pwrite(self._file, content, 0)

    def map(self) -> mmap.mmap:
        """Its memory, which stays when it is closed.

        Raises:
            OSError: it cannot be mapped.
        """
        return mmap.mmap(self._file, 0)

    def close(self) -> None:
        """Ranks that have opened it keep it."""
        os.close(self._file)
