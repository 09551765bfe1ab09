"""Counters of the tier, all since start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from kvoffload_patch.links import FAILURES, LOAD, MISMATCH, STORE, Link

# Why a block leaves the tier otherwise than to make room; `TierStats.removed` says what each means.
RemovedBy = Literal["reset", "emptied", "weights", "resized", "failed", "invalid"]


class FailedCopies(NamedTuple):
    """Copies that failed, and the blocks that they were of."""

    copies: int = 0
    blocks: int = 0


def _none_failed() -> dict[tuple[Link, str], FailedCopies]:
    return {(link, reason): FailedCopies() for link in (LOAD, STORE) for reason in FAILURES}


def _none_removed() -> dict[RemovedBy, int]:
    return dict.fromkeys(get_args(RemovedBy), 0)


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
        few_uses: blocks that were not stored because they had been used too seldom.
        decode: blocks of answers that were not stored because none are.
        opted_out: blocks that were not stored because their request said so.
        paused: blocks that were not stored because the tier was paused.
        removed: blocks that left otherwise, those still being written included, by reason. `reset`:
            vLLM's prefix cache was; `emptied`: by command; `weights`: these changed; `resized`: to
            less; `failed`: a copy of them did; `invalid`: the GPU turned out to hold other bytes.
        failed: blocks whose copy failed, in either direction.
        failed_copies: copies that failed, of however many blocks.
        failed_by: both, by link and reason; all of `links.FAILURES` are there.
        mismatches: loads that brought other bytes than were stored, on the rank that reports.
    """

    stored: int = 0
    loaded: int = 0
    evicted: int = 0
    dropped: int = 0
    overwritten: int = 0
    held: int = 0
    few_uses: int = 0
    decode: int = 0
    opted_out: int = 0
    paused: int = 0
    failed: int = 0
    failed_copies: int = 0
    mismatches: int = 0
    removed: dict[RemovedBy, int] = field(default_factory=_none_removed)
    failed_by: dict[tuple[Link, str], FailedCopies] = field(default_factory=_none_failed)

    @property
    def not_stored(self) -> dict[str, int]:
        """Blocks that were not stored, by reason."""
        return {
            "no_room": self.dropped, "overwritten": self.overwritten, "few_uses": self.few_uses,
            "decode": self.decode, "opted_out": self.opted_out, "paused": self.paused,
        }  # fmt: skip

    def add_failed(self, link: Link, reason: str, blocks: int) -> None:
        """A copy of so many blocks failed."""
        self.failed += blocks
        self.failed_copies += 1
        found = self.failed_by[link, reason]
        if reason == MISMATCH:
            # A result counts those of its own rank.
            self.mismatches = max(self.mismatches, found.copies + 1)
        self.failed_by[link, reason] = FailedCopies(found.copies + 1, found.blocks + blocks)
