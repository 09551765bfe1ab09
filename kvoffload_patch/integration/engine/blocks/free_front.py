"""Which free GPU blocks vLLM hands out next, told to the tier before they are overwritten."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from kvoffload_patch.integration.engine.adapters.vllm_scheduler import SchedulerView
from kvoffload_patch.tier.exclusive import blocks_ahead
from kvoffload_patch.tier.manager import OffloadManager


def step_blocks(view: SchedulerView) -> int:
    """Blocks that a step fills at most."""
    return view.blocks_for(int(view.scheduler.max_num_scheduled_tokens))


def ahead_of(view: SchedulerView) -> int:
    """How many free blocks are about to be handed out, as `blocks_ahead` has it."""
    return blocks_ahead(len(view.pool.blocks), step_blocks(view))


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
        self._step_blocks = step_blocks(view)
        self._ahead = ahead_of(view)
        self._told: set[int] = set()
        self._last: Any = None  # block that was looked at last
        self._unplanned = 0  # of these, how many the tier was told of since the last plan
        self._waited: str | None = None  # request that has waited for stores
        self._asked = False  # it was told to wait since the last plan
        self._refused: set[int] = set()  # blocks that are not stored, see `refuse`

    def hit(self, gpu_block_ids: Sequence[int], keys: Sequence[Hashable]) -> None:
        """Requests that store have taken blocks with these keys out of the queue, and use them.

        What they compute behind blocks that were refused is worth nothing without those.
        """
        if self._told:
            self._told.difference_update(gpu_block_ids)
        if not self._refused.isdisjoint(gpu_block_ids):
            # Not those that others were given since, in which no step may have computed anything.
            cached, pairs = self._view.still_cached, zip(gpu_block_ids, keys)
            self._refused.difference_update([block for block, key in pairs if cached(block, key)])

    def held(self, blocks: Iterable[Any]) -> None:
        """The tier has held these, so that those of them that nobody uses are handed out last."""
        if self._told:
            self._told.difference_update([block.block_id for block in blocks])

    def handed_out(self, gpu_block_ids: Iterable[int]) -> None:
        """These blocks will be overwritten."""
        if self._told:
            self._told.difference_update(gpu_block_ids)
        if self._refused:
            self._refused.difference_update(gpu_block_ids)

    def refuse(self, gpu_block_ids: Iterable[int]) -> None:
        """These blocks are not to be stored, until they are hit or hold something else."""
        self._refused.update(gpu_block_ids)

    def look(self) -> Mapping[Hashable, int]:
        """Tell the tier what will be handed out soon; right before a plan is made.

        Returns:
            GPU blocks, by key, of what this plan is to store.
        """
        leaving = self._manager.leaving(*self._new(self._ahead))
        self._unplanned = 0
        self._asked = False
        return leaving

    def may_overwrite(self, request_id: str, count: int) -> bool:
        """Whether a load can be given so many blocks without loss of what only they hold.

        Besides what this step fills. What the tier was told of before the last plan is stored with
        that at the latest. Where it is not enough, this step's plan stores the rest, and a request
        waits for that once; one behind it, whose load needs that as well, waits for its turn.
        """
        if not self._manager.lazy:
            return True
        needed = count + self._step_blocks
        if needed <= len(self._told) - self._unplanned or self._waited == request_id:
            return True
        if self._asked:
            return False
        self._store_first(needed)
        if not self._unplanned:
            return True  # there is nothing more that only the GPU holds
        self._store_first(count + self._ahead)  # until it is looked up again others take some
        self._waited, self._asked = request_id, True
        return False

    def clear(self) -> None:
        """vLLM's prefix cache was reset: nothing that was told holds."""
        self._refused.clear()
        self.look_again()

    def look_again(self) -> None:
        """What the tier was told it has forgotten, or may have."""
        self._told.clear()
        self._last = self._waited = None
        self._unplanned, self._asked = 0, False

    def _store_first(self, count: int) -> None:
        """Tell the tier of the first ``count``: the next plan stores what it lacks of them."""
        before = len(self._told)
        gpu_block_ids, keys = self._new(count)
        if keys and self._manager.about_to_lose(gpu_block_ids, keys):
            self._unplanned += len(self._told) - before

    def _new(self, count: int) -> tuple[list[int], list[Hashable]]:
        """Those of the first ``count`` of which the tier was not told, in order, and their keys."""
        ids: list[int] = []
        keys: list[Hashable] = []
        told = self._told
        last = self._last
        if last is not None and (last.ref_cnt or last.block_id not in told):
            last = None  # it has left the queue
        while (missing := count - len(told)) > 0:
            # From the first on, those that it was told of come before most others.
            blocks = self._view.free_after(last, missing + (len(told) if last is None else 0))
            if not blocks:
                break
            last = blocks[-1]
            found = [block.block_id for block in blocks]
            if not told.isdisjoint(found):
                blocks = [block for block in blocks if block.block_id not in told][:missing]
                found = [block.block_id for block in blocks]
                last = blocks[-1] if len(blocks) == missing else last
            told.update(found)
            ids += found
            keys += self._view.keys_in(blocks)
        self._last = last
        if not all(keys) or self._refused:
            pairs = zip(ids, keys)
            held = [(i, key) for i, key in pairs if key is not None and i not in self._refused]
            ids, keys = [i for i, _ in held], [key for _, key in held]
        return ids, keys
