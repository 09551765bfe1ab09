"""Stores of several steps, made as one copy: a decode step alone fills few blocks."""

from __future__ import annotations

from kvoffload_patch.links import Tickets
from kvoffload_patch.transfer.plans import Transfer

# One slice of a store; and not for ever, because what is not stored cannot be loaded.
BATCH_BYTES = 32 << 20
BATCH_STEPS = 16


class StoreBatcher:
    """Transfers out of the GPU that are not yet submitted, in the order of their tickets.

    Args:
        block_bytes: bytes that a block takes on the bus.

    Attributes:
        source_ids, target_ids: the pairs of all of them.
        first: the first ticket, 0 while there is none.
        done: what the last one's plan says is done: the copy goes behind that.
    """

    def __init__(self, block_bytes: int) -> None:
        self._enough = max(1, BATCH_BYTES // block_bytes)
        self.clear()

    def clear(self) -> None:
        """They are submitted."""
        self.source_ids: list[int] = []
        self.target_ids: list[int] = []
        self.first = self._steps = 0
        self.done: Tickets = ()

    def add(self, transfer: Transfer, done: Tickets) -> None:
        """One more, with the next ticket."""
        self.first = self.first or transfer.ticket
        self.source_ids += transfer.source_ids
        self.target_ids += transfer.target_ids
        self.done = done

    def step_ends(self) -> bool:
        """Whether it is time to submit them, with the step that ends now."""
        self._steps += bool(self.first)
        return len(self.target_ids) >= self._enough or self._steps >= BATCH_STEPS
