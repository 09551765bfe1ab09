"""What the tier keeps of each block and of each ticket."""

from __future__ import annotations

from collections.abc import Hashable

from kvoffload_patch.tier.plan import CopyBatch


class Block:
    """One slot's content. A ticket that reads or writes the slot holds a reference."""

    __slots__ = ("key", "ready", "ref_cnt", "slot")

    def __init__(self, key: Hashable, slot: int) -> None:
        self.key = key
        self.slot = slot
        self.ref_cnt = 1
        self.ready = False


class Ticket:
    """A batch under way, and the blocks that it holds."""

    __slots__ = ("batch", "blocks")

    def __init__(self, batch: CopyBatch, blocks: list[Block]) -> None:
        self.batch = batch
        self.blocks = blocks
