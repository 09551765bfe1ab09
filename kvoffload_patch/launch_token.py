"""How a process confirms the token that `python -m kvoffload_patch COMMAND` passes to it.

It maps a page of memory whose name holds the token, and the launch finds that name in
/proc/PID/maps. A forked child has the mapping too; a program that is executed does not, and has to
confirm for itself. No file is written, none is left behind, and nobody has to answer.
"""

from __future__ import annotations

import mmap
import os

VARIABLE = "KVOFFLOAD_LAUNCH"
DECIDED = "decided"  # before vLLM is imported: the tier is armed, refused, or disabled
ATTACHED = "attached"  # an engine has started, and said whether it has the tier

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
        _confirmed[what] = mmap.mmap(memory, mmap.PAGESIZE)
    except (OSError, ValueError):
        pass  # as above
    finally:
        os.close(memory)


def confirmed(what: str, token: str, maps: str) -> bool:
    """Whether the process with this text of /proc/PID/maps has confirmed `what` for the token."""
    return f"/memfd:{_name(what, token)} " in maps


def _name(what: str, token: str) -> str:
    return f"kvoffload_patch:{what}:{token}"
