"""What each rank has by now, slots and copies, in memory that the ranks of an engine share.

The executor returns one rank's result, and another rank may have fewer slots, or may have failed
to get more. So that one rank can speak for all, each writes down what it has. Asking the others by
RPC would hold the engine up for as long as a step takes, and often: a tier of two ranks may grow
by a tenth of its size in a second.

Where ranks have slots in common (`shared_files`), one must not read a slot before another has
stored to it, nor store to it while another reads it. Where loads are compared with checksums, no
block of them is given to a request before every rank has compared its part; and where they are not,
what one rank could not store must not be loaded on it. So each rank writes down the last tickets
that it has done, and which of them has failed; the least of them are what is done.

A rank whose result nobody sees cannot say that it could not carry out a step. It would be waited
for if it raised, so it writes that down here, and goes on. The engine looks before it gives tokens
away (`Alarms`).
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence

from kvoffload_patch.integration.shared_files import SharedFile, SharedFileAddress
from kvoffload_patch.links import FAILURES, LOAD, STORE, Failure, Tickets, ticket_on

_LINKS = (LOAD, STORE)
_REASONS = 1 << len(FAILURES).bit_length()  # why the ticket in a cell has failed, or 0


def make_slot_counts(ranks: Sequence[int]) -> SharedFile | None:
    """A new board for these ranks, no rank with any slots yet; None where there can be none."""
    if len(set(ranks)) != len(ranks):
        return None  # a cell has one writer
    try:
        file = SharedFile(ranks)
    except (OSError, AttributeError):
        return None  # this system has no such files
    cells = [_cell(0, True)] * len(ranks) + [0] * len(ranks) * (len(_LINKS) + 1)
    try:
        # Written, not only made that long: memory that is not there is an error here, and would
        # end a process later.
        file.write(struct.pack(f"{len(cells)}q", *cells))
    except OSError:
        file.close()
        return None
    return file


class SlotCounts:
    """One rank's view of the board.

    Args:
        address: of the engine's file, which is not closed yet.
        rank: whose cell this process writes.

    Raises:
        OSError: the board cannot be opened here.
    """

    def __init__(self, address: SharedFileAddress, rank: int) -> None:
        file = address.open()
        try:
            # A cell is written and read in one piece, so no lock is needed.
            memory = mmap.mmap(file, 0)
        finally:
            os.close(file)
        self._cells = memoryview(memory).cast("q")
        self._own, self._ranks = address.ranks.index(rank), len(address.ranks)

    def exchange(self, num_ready: int, growing: bool) -> tuple[int, bool]:
        """Write down what this rank has, and read what all have.

        Args:
            num_ready: slots usable on this rank; never fewer than before.
            growing: whether it will have more.

        Returns:
            Slots usable on every rank, and whether they will become more.
        """
        self._cells[self._own] = _cell(num_ready, growing)
        # Of ranks with the same number, one that does not grow comes first.
        fewest = min(self._cells[: self._ranks])
        return fewest >> 1, bool(fewest & 1)

    def exchange_done(
        self, done: Tickets, failed: tuple[Failure, ...] = ()
    ) -> tuple[Tickets, tuple[Failure, ...]]:
        """Write down what this rank has done, per link, and read what all have.

        A rank stays at the first ticket of a link that has failed on it, until that is known and
        named no more: so nobody sees that it is done without seeing that it has failed.

        Args:
            done: the last ticket of each link.
            failed: those up to there that the scheduler may not know of.

        Returns:
            The last ticket of each link that all ranks have done; what has failed on any.
        """
        tickets, failures = [], list[Failure]()
        for at, link in enumerate(_LINKS, start=1):
            own = [one for one in failed if one.link == link]
            cells = self._cells[at * self._ranks : (at + 1) * self._ranks]
            cells[self._own] = _done_cell(ticket_on(done, link), own)
            found = cells.tolist()
            tickets.append((link, min(found) // _REASONS))
            for cell in found:
                if why := cell % _REASONS:
                    failures.append(Failure(link, cell // _REASONS, FAILURES[why - 1]))
        return tuple(tickets), tuple(failures)

    @property
    def alarm(self) -> bool:
        """Whether this rank has said that no token of its step may leave; never taken back."""
        return bool(self._alarms[self._own])

    def ring(self) -> None:
        """Say it."""
        self._alarms[self._own] = 1

    @property
    def _alarms(self) -> memoryview:
        return self._cells[(1 + len(_LINKS)) * self._ranks :]


class Alarms:
    """The engine's view of all alarms.

    Args:
        file: of the board, not closed yet.

    Raises:
        OSError: it cannot be mapped.
    """

    def __init__(self, file: SharedFile) -> None:
        self._ranks = file.address.ranks
        cells = memoryview(file.map()).cast("q")
        self._cells = cells[(1 + len(_LINKS)) * len(self._ranks) :]

    def said(self) -> str:
        """Which rank has not carried out its step, and what to do; empty: all have."""
        if not any(self._cells):
            return ""
        rank = next(rank for rank, rung in zip(self._ranks, self._cells) if rung)
        return (
            f"kvoffload_patch: expected rank {rank} to carry out its part of each step, found "
            "that it could not, for the reason that its own message names; restart the server, "
            "and do what that message says."
        )


def _done_cell(done: int, failed: Sequence[Failure]) -> int:
    """The last ticket done, or the first that has failed, and why."""
    if not failed:
        return done * _REASONS
    first = min(failed, key=lambda one: one.ticket)
    return first.ticket * _REASONS + FAILURES.index(first.reason) + 1


def _cell(num_ready: int, growing: bool) -> int:
    return num_ready << 1 | growing
