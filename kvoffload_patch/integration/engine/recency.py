"""Blocks that requests hit on the GPU stay recent in the tier."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from kvoffload_patch.integration.engine.vllm_scheduler import SchedulerView
from kvoffload_patch.tier.manager import OffloadManager


class Recency:
    """Keeps what requests hit on the GPU recent in the tier, and stores what it has lost since.

    One step later: the step that a request joins is the longest on the host as it is.

    Args:
        view: the scheduler.
        manager: of the tier.
    """

    def __init__(self, view: SchedulerView, manager: OffloadManager) -> None:
        self._view = view
        self._manager = manager
        self._used: list[list[tuple[int, Hashable]]] = []

    def note(self, blocks: Sequence[Any]) -> None:
        """A request hits these GPU blocks, in prefix order; loads under way may fill some."""
        if blocks:
            keyed = [(b.block_id, b.block_hash) for b in blocks if b.block_hash is not None]
            self._used.append(keyed)

    def refresh(self) -> None:
        """Take in what was noted since."""
        for prefix in self._used:
            self._manager.touch([key for _, key in prefix])
            for gpu_block_id, key in prefix:
                # What has left the GPU cache meanwhile may have made room for another's store.
                if not self._manager.holds(key) and self._view.still_cached(gpu_block_id, key):
                    self._manager.queue_store(key, gpu_block_id)
        self._used.clear()

    def clear(self) -> None:
        """Forget what was noted."""
        self._used.clear()
