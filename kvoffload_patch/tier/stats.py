"""Counters of the tier, all since start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TierStats:
    """Plain counters in blocks; a block of one KV cache group counts once.

    Attributes:
        stored: blocks whose store is done.
        loaded: blocks whose load is done.
        evicted: blocks thrown out to make room.
        dropped: blocks that were not stored because every slot was being read or written.
        overwritten: blocks that were not stored because the GPU had lost them before.
        held: blocks that were computed and not stored, because the tier had them already.
        failed: blocks whose copy failed, in either direction.
        failed_copies: copies that failed, of however many blocks.
        failed_loads, failed_load_copies: of these, loads.
        mismatches: loads that brought other bytes than were stored, on the rank that reports.
    """

    stored: int = 0
    loaded: int = 0
    evicted: int = 0
    dropped: int = 0
    overwritten: int = 0
    held: int = 0
    failed: int = 0
    failed_copies: int = 0
    failed_loads: int = 0
    failed_load_copies: int = 0
    mismatches: int = 0

    def add_failed(self, blocks: int, loaded: bool) -> None:
        """A copy of so many blocks failed, a load or a store."""
        self.failed += blocks
        self.failed_copies += 1
        if loaded:
            self.failed_loads += blocks
            self.failed_load_copies += 1
