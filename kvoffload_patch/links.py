"""Places that hold KV blocks, and the links between them that copies, tickets and queues go by.

Shared by the tier, which plans copies, and by the ranks, which make them. A further tier or another
device is a further name here and a link that somebody can copy on.
"""

from __future__ import annotations

GPU = "gpu"  # where the forward pass reads and writes; numbered by GPU block id
CPU = "cpu"  # numbered by CPU slot

Link = tuple[str, str]  # source and target
LOAD: Link = (CPU, GPU)
STORE: Link = (GPU, CPU)

# One number for each link that has any. Plain tuples: they are pickled with every step's plan.
Tickets = tuple[tuple[Link, int], ...]


def ticket_on(tickets: Tickets, link: Link) -> int:
    """The ticket of a link; 0, which stands before all tickets, if it is not there."""
    for found, ticket in tickets:
        if found == link:
            return ticket
    return 0


def tickets_on(tickets: Tickets, link: Link) -> tuple[int, ...]:
    """Every ticket of a link."""
    return tuple([ticket for found, ticket in tickets if found == link])
