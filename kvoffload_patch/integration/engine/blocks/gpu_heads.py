"""Has the GPU keep the heads of prefixes alone while hits find more there that way."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from kvoffload_patch.integration.engine.adapters.vllm_scheduler import SchedulerView
from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.prefix_share import Hit, PrefixShare
from kvoffload_patch.tier.tuning import HEADS_FRONT_BLOCKS


class GpuHeads:
    """Moves tails that the tier has to the front of vLLM's queue of free blocks.

    So they are handed out before what was used less recently. A tail is moved once, when its
    request has ended: O(blocks of the tail).

    Args:
        view: the scheduler, whose blocks are handed out in an order that can be changed.
        manager: of the tier.

    Attributes:
        prefix_share: how much of each prefix is kept.
    """

    def __init__(self, view: SchedulerView, manager: OffloadManager) -> None:
        self._view = view
        self._manager = manager
        self.clear()

    def ended(
        self,
        keys: Sequence[Hashable],
        rests: Mapping[Hashable, Hashable],
        hit: Hit,
        whole: bool,
    ) -> None:
        """A request has ended.

        Args:
            keys: that it used, head first, each once.
            rests: of these, those of other KV cache groups than one, and the key of that group that
                each ends with: it is given up with that.
            hit: what it has found of that one.
            whole: keep all of it, as nothing is loaded now, or as `blocks_are_left`.
        """
        view, manager = self._view, self._manager
        whole = whole or manager.lazy
        free, slots = view.num_free_blocks(), manager.num_slots
        of_one = [key for key in keys if key not in rests] if rests else keys
        tail = self.prefix_share.ended(of_one, hit, free, slots, whole)
        if not tail:
            return
        if rests:
            given = {*tail}
            tail = [key for key in keys if rests.get(key, key) in given]
        # Nothing is lost: what the tier does not have stays where it is.
        has, find = manager.reader(), view.gpu_lookup()
        blocks = map(find, (key for key in reversed(tail) if has(key) is not None))
        view.adapter.hand_out_first([b for b in blocks if b is not None and not b.ref_cnt])

    def blocks_are_left(self, ended: int) -> bool:
        """Whether vLLM hands out blocks that hold no prefix: a tail would be before them.

        Args:
            ended: requests that have ended in this step, each of which may have left some.
        """
        view = self._view
        front = view.free_after(None, HEADS_FRONT_BLOCKS + ended * view.decode_blocks)
        return not any(view.keys_in(front))

    def clear(self) -> None:
        """The prefix cache is empty."""
        self.prefix_share = PrefixShare(len(self._view.pool.blocks))
