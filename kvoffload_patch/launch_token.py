"""What processes say to the launch whose token `python -m kvoffload_patch COMMAND` passes to them.

A process confirms the token, and an engine that is refused tells why.

It maps a page of memory whose name holds the token, and the launch finds that name in
/proc/PID/maps. A forked child has the mapping too; a program that is executed does not, and has to
confirm for itself. No file is written, none is left behind, and nobody has to answer.

A refusal goes to a socket without a file, named by the token, and is kept by the launch until its
command has ended: vLLM says much more after an engine has failed to start.
"""

from __future__ import annotations

import mmap
import os
import struct
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

VARIABLE = "KVOFFLOAD_LAUNCH"
DECIDED = "decided"  # before vLLM is imported: the tier is armed, refused, or disabled
ATTACHED = "attached"  # an engine has started, and said whether it has the tier

_MOST_BYTES = 4096
_CREDENTIALS = struct.Struct("3i")  # process, user, group

_confirmed: dict[str, mmap.mmap] = {}


def confirm(what: str) -> None:
    """Confirm `what`, DECIDED or ATTACHED, for as long as this process and its forks live.

    Without a token in the environment, or where the system has no named memory, nothing is done:
    a launch asks `python -m kvoffload_patch` itself first whether it can be seen.
    """
    token = os.environ.get(VARIABLE)
    if not token or what in _confirmed:
        return
    try:
        memory = os.memfd_create(_name(what, token))
    except (AttributeError, OSError):
        return
    try:
        os.ftruncate(memory, mmap.PAGESIZE)
        _confirmed[what] = mapped = mmap.mmap(memory, mmap.PAGESIZE)
        _never_unmap(mapped)
    except (OSError, ValueError):
        pass  # as above
    finally:
        os.close(memory)


def _never_unmap(mapped: mmap.mmap) -> None:
    """Keep it until the process is gone.

    An interpreter that ends unmaps whatever its modules hold, and a vLLM needs seconds from then
    on: the launch would take it for one in which our code did not run.
    """
    with suppress(ImportError, AttributeError):
        import ctypes  # not at every start of a Python

        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapped))


def confirmed(what: str, token: str, maps: str) -> bool:
    """Whether the process with this text of /proc/PID/maps has confirmed `what` for the token."""
    return f"/memfd:{_name(what, token)} " in maps


def tell(text: str) -> None:
    """Tell the launch of this process, if there is one that listens, why it refuses to start."""
    import socket  # not at every start of a Python

    token = os.environ.get(VARIABLE)
    if token:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(text.encode("utf-8", "replace")[:_MOST_BYTES], _address(token))


def listen(token: str) -> socket.socket | None:
    """Where the launch is told; None if another one that has this token listens already."""
    import socket

    found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        found.bind(_address(token))
    except OSError:
        found.close()
        return None
    found.setblocking(False)
    return found


def told(by: socket.socket) -> list[str]:
    """What processes of this user have told so far, each text once, without line breaks."""
    import socket

    found = []
    with suppress(BlockingIOError):
        while True:
            data, more, _, _ = by.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
            users = [_CREDENTIALS.unpack(sent)[1] for _, kind, sent in more
                     if kind == socket.SCM_CREDENTIALS]  # fmt: skip
            if users == [os.geteuid()]:
                found.append(" ".join(data.decode("utf-8", "replace").split()))
    return list(dict.fromkeys(found))


def _address(token: str) -> str:
    return f"\0{_name('refused', token)}"


def _name(what: str, token: str) -> str:
    return f"kvoffload_patch:{what}:{token}"
