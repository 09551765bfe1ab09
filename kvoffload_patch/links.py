"""Places that hold KV blocks, the links between them that copies, tickets and queues go by, and
why a copy fails.

Shared by the tier, which plans copies, and by the ranks, which make them. A further tier or another
device is a further name here and a link that somebody can copy on.
"""

from __future__ import annotations

from typing import NamedTuple

GPU = "gpu"  # where the forward pass reads and writes; numbered by GPU block id
CPU = "cpu"  # numbered by CPU slot

Link = tuple[str, str]  # source and target
LOAD: Link = (CPU, GPU)
STORE: Link = (GPU, CPU)

# One number for each link that has any. Plain tuples: they are pickled with every step's plan.
Tickets = tuple[tuple[Link, int], ...]

# Why a copy failed: the device, its driver or the backend raised; it was queued past its deadline;
# its CPU slots never came; it brought other bytes than were stored; what it reads was
# never stored on this rank. All that there are: metrics have one series for each.
RAISED, LATE, NO_SLOTS, MISMATCH, NOT_STORED = (
    "raised", "late", "no_slots", "mismatch", "not_stored",
)  # fmt: skip
FAILURES = (RAISED, LATE, NO_SLOTS, MISMATCH, NOT_STORED)


class Failure(NamedTuple):
    """A copy that failed: its link, its ticket, and one of `FAILURES`."""

    link: Link
    ticket: int
    reason: str


def ticket_on(tickets: Tickets, link: Link) -> int:
    """The ticket of a link; 0, which stands before all tickets, if it is not there."""
    for found, ticket in tickets:
        if found == link:
            return ticket
    return 0
