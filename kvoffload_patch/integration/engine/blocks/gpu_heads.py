"""Has the GPU keep the heads of prefixes alone while hits find more there that way."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from kvoffload_patch.integration.engine.adapters.vllm_scheduler import SchedulerView
from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.prefix_share import PrefixShare


class GpuHeads:
    """Moves tails that the tier has to the front of vLLM's queue of free blocks.

    So they are handed out before what was used less recently. A tail is moved once, when its
    request has ended: O(blocks of the tail).

    Args:
        view: the scheduler.
        manager: of the tier.
    """

    def __init__(self, view: SchedulerView, manager: OffloadManager) -> None:
        self._view = view
        self._manager = manager
        self.clear()

    @staticmethod
    def fits(view: SchedulerView) -> bool:
        """Whether a prefix is a row of blocks, handed out in an order that can be changed."""
        return view.in_order and view.adapter.in_order

    @property
    def share(self) -> float:
        """Of a prefix that the GPU keeps, from its head on; 1: all of it."""
        return self._share.share

    def found(self, keys: Iterable[Hashable | None], gpu_tokens: int) -> None:
        """A request finds the blocks of these keys, head first, and so many tokens on the GPU."""
        on_gpu = gpu_tokens // self._view.block_sizes[0]
        self._share.found((key for key in keys if key is not None), on_gpu)

    def ended(self, keys: Sequence[Hashable | None], whole: bool) -> None:
        """A request has ended.

        Args:
            keys: that it used, head first; None for blocks without one.
            whole: keep all of it, as nothing is loaded now.
        """
        view, manager = self._view, self._manager
        used = [key for key in dict.fromkeys(keys) if key is not None]
        blocks_now = view.num_free_blocks(), view.adapter.num_cached()
        tail = self._share.ended(used, *blocks_now, manager.num_slots, whole or manager.lazy)
        if not tail:
            return
        # Nothing is lost: what the tier does not have stays where it is.
        has, find = manager.reader(), view.gpu_lookup()
        blocks = [find(key) for key in reversed(tail) if has(key) is not None]
        free = [block for block in blocks if block is not None and not block.ref_cnt]
        view.adapter.hand_out_first(free)

    def clear(self) -> None:
        """The prefix cache is empty."""
        self._share = PrefixShare(len(self._view.pool.blocks))
