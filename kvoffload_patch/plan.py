"""What passes between the tier and the ranks: small, frozen, picklable."""

from __future__ import annotations

from typing import NamedTuple

from kvoffload_patch.links import Failure, Link, Tickets, ticket_on


class Transfer(NamedTuple):
    """Blocks copied under one ticket, from one place to another.

    Attributes:
        ticket: counts up by one on each link.
        source, target: places, as `kvoffload_patch.links` names them.
        source_ids, target_ids: numbers of blocks there (GPU block ids, CPU slots); block
            ``source_ids[i]`` is copied to ``target_ids[i]``.
        compared: with the checksums that the blocks were stored with, where they have any.
    """

    ticket: int
    source: str
    target: str
    source_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    compared: bool = False


class TransferPlan(NamedTuple):
    """One step's transfers, the same for every rank, and the waits that keep their bytes right.

    A rank orders its own copies. GPU blocks are ordered by the forward pass. In any other place, a
    transfer goes behind the tickets in ``done`` of every link that fills what it reads, or reads
    or fills what it overwrites: the rank that reported them may be ahead of this one.

    Attributes:
        before: transfers submitted before the forward pass and after everything computed so far.
        after: transfers submitted after the forward pass.
        waits: per link, the ticket up to which the forward pass waits: it may read what a link into
            the GPU brings, or write where one that is not read still writes, and may overwrite
            the GPU blocks that a link out of it reads.
        done: per link, the last ticket known to be done when the plan was made.
        promised: transfers whose blocks the prefix cache has already, so that this forward pass may
            read them. A rank on which one of them has failed raises.
    """

    before: tuple[Transfer, ...] = ()
    after: tuple[Transfer, ...] = ()
    waits: Tickets = ()
    done: Tickets = ()
    promised: Tickets = ()

    def waits_for(self, link: Link) -> int:
        """The ticket of a link up to which the forward pass waits; 0 if it does not."""
        return ticket_on(self.waits, link)

    def known_done(self, link: Link) -> int:
        """The last ticket of a link known to be done when the plan was made; 0 if none."""
        return ticket_on(self.done, link)


class TransferResult(NamedTuple):
    """What one rank has done so far.

    Attributes:
        done: per link, the ticket up to which all are done.
        failed: transfers whose bytes did not arrive, with their links; they count as done all the
            same. Each is named again until a plan shows that it was taken in.
        num_slots: CPU slots usable so far, from slot 0 on; None says nothing new of them.
        growing: more of them are to come, where their number is said.
        mismatches: loads since start that brought other bytes than were stored.
        sizing: which change of the tier's size that number is of, counted from 0, its first size.
        by_layer: the forward pass waits for loads layer by layer where it can.
        slowdown: how long loads take lately, in times of what was measured when the tier was
            opened.
    """

    done: Tickets = ()
    failed: tuple[Failure, ...] = ()
    num_slots: int | None = None
    growing: bool = False
    mismatches: int = 0
    sizing: int = 0
    by_layer: bool = False
    slowdown: float = 1.0

    def done_on(self, link: Link) -> int:
        """The ticket up to which all of a link are done; 0 if none is."""
        return ticket_on(self.done, link)

    def failed_on(self, link: Link) -> tuple[int, ...]:
        """The transfers of a link that failed."""
        return tuple([one.ticket for one in self.failed if one.link == link])
