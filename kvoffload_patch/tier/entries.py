"""What the tier keeps of each block, of each transfer under way and of each link."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from kvoffload_patch.links import Link


class Block:
    """One slot's content. A transfer that reads or writes the slot holds a reference."""

    __slots__ = ("key", "ready", "ref_cnt", "slot")

    def __init__(self, key: Hashable, slot: int) -> None:
        self.key = key
        self.slot = slot
        self.ref_cnt = 1
        self.ready = False


class LinkTickets:
    """The tickets of one link, which are done in their order.

    Attributes:
        last: the last one given out.
        done: the last one known to be done.
        wait: what the next plan's forward pass waits for.
        failed: those that failed, until a plan says that they are done.
        under_way: those not known to be done, and the blocks that each holds.
    """

    __slots__ = ("done", "failed", "last", "link", "under_way", "wait")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.last = self.done = self.wait = 0
        self.failed: set[int] = set()
        self.under_way: deque[tuple[int, list[Block]]] = deque()

    def give_out(self, blocks: list[Block]) -> int:
        """The next ticket, for a transfer that holds these blocks."""
        self.last += 1
        self.under_way.append((self.last, blocks))
        return self.last

    def wait_for(self, ticket: int) -> None:
        """The next plan's forward pass waits for this ticket and those before it."""
        if ticket > self.wait:
            self.wait = ticket

    def planned(self) -> None:
        """A plan was made, with what is waited for and known to be done."""
        self.wait = 0
        if self.failed:
            self.failed = {ticket for ticket in self.failed if ticket > self.done}
