"""Where the sockets are: a folder that only its user can enter, and names that nobody has to guess.

Everything is done by a descriptor of the folder that was looked at, so that no other folder can
take its place in between, and so that a long path is no obstacle for a socket's address.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from kvoffload_patch.control.errors import Refused

SUFFIX = ".sock"
_NAME = re.compile(rf"\d+-\w+{re.escape(SUFFIX)}", re.ASCII)  # see `new_name`
SHARED = Path("/tmp")  # where a server has it whose TMPDIR is another
LOCK_S = 5.0  # it is held for some system calls, and for CONNECT_S where one is not answered
CONNECT_S = 1.0


def candidates(environ: Mapping[str, str] | None = None) -> list[Path]:
    """Folders that sockets of this user may be in; a new one goes to the first that can be had.

    A server that was started by the system has no XDG_RUNTIME_DIR, and its user may have one.
    """
    runtime = (os.environ if environ is None else environ).get("XDG_RUNTIME_DIR", "")
    own = [Path(runtime) / "kvoffload"] if os.path.isabs(runtime) else []
    shared = [SHARED]
    with suppress(FileNotFoundError):  # nobody may write anywhere
        shared.insert(0, Path(tempfile.gettempdir()))
    return own + [folder / f"kvoffload-{os.geteuid()}" for folder in dict.fromkeys(shared)]


@contextmanager
def making(
    environ: Mapping[str, str] | None = None, begin: Callable[[int], object] = int
) -> Iterator[int]:
    """A descriptor of the folder for a new socket, locked; it stays open if nothing is raised.

    Args:
        environ: as `candidates` takes it.
        begin: called with it first; where that raises an OSError, the next folder is tried. One
            that is there already may be on a disk that is full, or cannot be written to any more.

    Raises:
        Refused: there can be no such folder, and why not.
    """
    wrong = []
    for path in candidates(environ):
        try:
            folder = _make(path)
            try:
                begin(folder)
            except BaseException:
                leave(folder)
                raise
        except (OSError, Refused) as error:
            wrong.append(str(error).rstrip("."))
            continue
        try:
            yield folder
        except BaseException:
            leave(folder)
            raise
        fcntl.flock(folder, fcntl.LOCK_UN)
        return
    raise Refused(f"{'; '.join(wrong)}.")


def leave(folder: int) -> None:
    """This process has no socket in the folder any more: remove it if nobody has, and close it."""
    try:
        with suppress(OSError, Refused), locked(folder):
            os.rmdir(os.readlink(f"/proc/self/fd/{folder}"))
    finally:
        os.close(folder)


def open_one(path: Path) -> int:
    """A descriptor of a folder, which is this user's and nobody else can enter.

    Raises:
        OSError: there is none, or it is a link.
        Refused: it is another's, or open to others.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    found = os.fstat(folder)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(folder)
        own = found.st_uid == os.geteuid()
        raise Refused(
            f"expected {path} to be open to user {os.geteuid()} alone, found mode "
            f"{stat.S_IMODE(found.st_mode):o} and owner {found.st_uid}; "
            f"{'set its mode to 700' if own else 'remove it'}."
        )
    return folder


def new_name() -> str:
    """A name for a socket of this process."""
    return f"{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"


def address(folder: int, name: str) -> str:
    """What to bind and connect to, for as long as the descriptor is open."""
    return f"/proc/self/fd/{folder}/{name}"


@contextmanager
def locked(folder: int) -> Iterator[None]:
    """Nobody else makes sockets in the folder, or removes stale ones, meanwhile.

    Raises:
        Refused: somebody else holds it for too long.
    """
    _lock(folder)
    try:
        yield
    finally:
        fcntl.flock(folder, fcntl.LOCK_UN)


def _make(path: Path) -> int:
    """Make a folder if there is none; a descriptor of it, locked."""
    while True:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        try:
            folder = open_one(path)
        except FileNotFoundError:  # the engine that had the last socket has just removed it
            continue
        try:
            _lock(folder)
        except BaseException:
            os.close(folder)
            raise
        if os.fstat(folder).st_nlink:
            return folder
        os.close(folder)  # it has been removed since


def _lock(folder: int) -> None:
    until = time.monotonic() + LOCK_S
    while True:
        try:
            return fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                text = f"expected the lock of the folder within {LOCK_S:.0f} s, found it held"
                raise Refused(text) from None
            time.sleep(0.01)


def sockets(folder: int) -> list[str]:
    """The names of all sockets in the folder, stale ones included, and of nothing else."""
    return sorted(filter(_NAME.fullmatch, os.listdir(folder)))


def connect(folder: int, name: str) -> socket.socket | None:
    """A connection to a socket; None if nobody listens any more: it is stale.

    Raises:
        OSError: somebody may listen, and does not take the connection.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    until = time.monotonic() + CONNECT_S
    while True:
        try:
            connection.connect(address(folder, name))
            return connection
        except BlockingIOError:  # others wait to be taken
            if time.monotonic() < until:
                time.sleep(0.01)
                continue
            connection.close()
            raise
        except (ConnectionRefusedError, FileNotFoundError):
            connection.close()
            return None
        except BaseException:
            connection.close()
            raise


def remove_stale(folder: int) -> None:
    """Remove sockets of processes that were killed; the folder is locked."""
    for name in sockets(folder):
        with suppress(OSError):
            connection = connect(folder, name)
            if connection is None:
                os.unlink(name, dir_fd=folder)
            else:
                connection.close()
