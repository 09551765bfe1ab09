"""Which free GPU blocks vLLM hands out next, told to the tier before they are overwritten."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from kvoffload_patch.integration.engine.vllm_scheduler import SchedulerView
from kvoffload_patch.tier.exclusive import blocks_ahead
from kvoffload_patch.tier.manager import OffloadManager


class FreeFront:
    """The front of vLLM's queue of free blocks, as far as the tier has been told of it.

    A step costs O(blocks that came to the front since the last). A block that leaves the queue
    unnoticed counts as looked at until it is handed out: then the tier is told of one block less.

    Args:
        view: the scheduler.
        manager: of the tier.
    """

    def __init__(self, view: SchedulerView, manager: OffloadManager) -> None:
        self._view = view
        self._manager = manager
        step_blocks = view.blocks_for(int(view.scheduler.max_num_scheduled_tokens))
        self._ahead = blocks_ahead(len(view.pool.blocks), step_blocks)
        self._told: set[int] = set()
        self._last: Any = None  # block that was looked at last
        self._waited: str | None = None  # request that has waited for stores
        self._refused: set[int] = set()  # blocks that are not stored until they are handed out

    def hit(self, gpu_block_ids: Iterable[int]) -> None:
        """Requests have taken these blocks out of the queue, and use what they hold."""
        self._told.difference_update(gpu_block_ids)

    def handed_out(self, gpu_block_ids: Iterable[int]) -> None:
        """These blocks will be overwritten."""
        self._told.difference_update(gpu_block_ids)
        if self._refused:
            self._refused.difference_update(gpu_block_ids)

    def refuse(self, gpu_block_ids: Iterable[int]) -> None:
        """These blocks are not to be stored, until they hold something else."""
        self._refused.update(gpu_block_ids)

    def look(self) -> None:
        """Tell the tier what will be handed out soon; before a plan is made."""
        self._look(self._ahead)

    def may_overwrite(self, request_id: str, count: int) -> bool:
        """Whether so many blocks can be handed out without loss of what only they hold.

        If not, this step's plan stores it, and a request waits for that once.
        """
        if self._waited == request_id:
            return True
        if not self._look(count + self._ahead):
            return True
        self._waited = request_id
        return False

    def clear(self) -> None:
        """vLLM's prefix cache was reset: nothing that was told holds."""
        self._refused.clear()
        self.look_anew()

    def look_anew(self) -> None:
        """What the tier was told it has forgotten, or may have."""
        self._told.clear()
        self._last = self._waited = None

    def _look(self, count: int) -> int:
        """Tell the tier of the first ``count``; returns how many of them it has to store."""
        missing, told = count - len(self._told), self._told
        if missing <= 0:
            return 0
        last = self._last
        if last is not None and (last.ref_cnt or last.block_id not in told):
            last = None  # it has left the queue
        found = list[tuple[int, Hashable]]()
        for block in self._view.free_after(last):
            last = block
            if block.block_id in told:
                continue
            told.add(block.block_id)
            if block.block_hash is not None and block.block_id not in self._refused:
                found.append((block.block_id, block.block_hash))
            missing -= 1
            if not missing:
                break
        self._last = last
        return self._manager.about_to_lose(found) if found else 0
