"""Stores of several steps, made as one copy: a decode step alone fills few blocks."""

from __future__ import annotations

from kvoffload_patch.transfer.plans import Batch

# One slice of a store; and not for ever, because what is not stored cannot be loaded.
BATCH_BYTES = 32 << 20
BATCH_STEPS = 16


class StoreBatcher:
    """Stores that are planned and not yet submitted, in the order of their tickets.

    Args:
        block_bytes: bytes that a block takes on the bus.

    Attributes:
        gpu_block_ids, cpu_slots: the pairs of all of them.
        first: the first ticket, 0 while there is none.
        last: the last ticket of all so far, submitted ones included.
        loads_done: the load that they must come behind.
    """

    def __init__(self, block_bytes: int) -> None:
        self.last = 0
        self._enough = max(1, BATCH_BYTES // block_bytes)
        self.clear()

    def clear(self) -> None:
        """They are submitted."""
        self.gpu_block_ids: list[int] = []
        self.cpu_slots: list[int] = []
        self.first = self.loads_done = self._steps = 0

    def add(self, batch: Batch, loads_done: int) -> None:
        """One more, with the next ticket."""
        self.first = self.first or batch.ticket
        self.last = batch.ticket
        self.gpu_block_ids += batch.gpu_block_ids
        self.cpu_slots += batch.cpu_slots
        self.loads_done = loads_done

    def step_ends(self) -> bool:
        """Whether they have been gathered for long enough, with the step that ends now."""
        self._steps += bool(self.first)
        return len(self.cpu_slots) >= self._enough or self._steps >= BATCH_STEPS
