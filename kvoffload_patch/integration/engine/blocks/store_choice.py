"""Which blocks of a request are not stored, as it asked or answers are not, and which wait."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from kvoffload_patch.config import FALSE, TRUE
from kvoffload_patch.integration.engine.adapters.vllm_scheduler import SchedulerView
from kvoffload_patch.integration.engine.blocks.free_front import FreeFront, ahead_of
from kvoffload_patch.integration.engine.blocks.recency import Recency
from kvoffload_patch.tier.manager import OffloadManager

# In `SamplingParams.extra_args`, which is `vllm_xargs` over HTTP (from 0.9.2 on).
ARGUMENT = "kvoffload_store"
logger = logging.getLogger("vllm.kvoffload_patch")


def stores(request: Any) -> bool:
    """Whether a request lets its blocks be stored: what is not understood may be meant to opt out.

    Args:
        request: a `vllm.v1.request.Request`.
    """
    sampling = request.sampling_params  # None where it pools
    arguments = sampling.extra_args if sampling is not None else None
    if not arguments or (asked := arguments.get(ARGUMENT)) is None:
        return True
    if isinstance(asked, (bool, int, float)):
        return bool(asked)
    word = asked.strip().lower() if isinstance(asked, str) else None
    if word not in TRUE + FALSE and not _Unknown.told:
        _Unknown.told = True  # once: clients choose what comes here
        logger.warning(
            "KV offload: expected 0 or 1 as %s of request %s, found %.40r; neither this request is "
            "stored, nor any other with such a value: give 0 or 1",
            ARGUMENT, request.request_id, asked,
        )  # fmt: skip
    return word in TRUE


class _Unknown:
    told = False  # in this process


class StoreChoice:
    """Which of the blocks that were cached for requests are stored; what is not is counted.

    Args:
        view: the scheduler.
        manager: of the tier.
        front: of the free blocks, for blocks that are stored before the GPU loses them.
        recency: told of what requests compute.
        decode: whether blocks that answers fill are stored.

    Attributes:
        decode: the same; only if not, `note_answers` is to be called.
    """

    def __init__(
        self,
        view: SchedulerView,
        manager: OffloadManager,
        front: FreeFront,
        recency: Recency,
        decode: bool,
    ) -> None:
        self._view = view
        self._manager = manager
        self._uncache = view.adapter.uncache
        self._front = front
        self._recency = recency
        self.decode = decode
        self._answers: set[int] | None = None if decode else set()  # GPU blocks
        scheduler = view.scheduler
        self._any_waits = view.in_order and not view.adapter.elastic and scheduler.connector is None
        self._blocks_ahead = ahead_of(view)

    def note_answers(
        self, request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int, size: int
    ) -> None:
        """Blocks are cached, as `BlockPool.cache_full_blocks` is told, of so many tokens each.

        A block that a prompt and its answer share is the answer's.
        """
        if self._answers is not None:
            first = max(num_cached_blocks, request.num_prompt_tokens // size)
            self._answers.update([block.block_id for block in blocks[first:num_full_blocks]])

    def computed(
        self, cached: Iterable[tuple[Any, Sequence[Any]]], scheduled: Mapping[str, int]
    ) -> dict[Hashable, int]:
        """GPU blocks by the keys that a step computes in them, of those cached within `schedule`.

        A block's key is read where its property finds it: a call less for each block.

        Args:
            cached: requests, and blocks of each.
            scheduled: requests of the step, by id.
        """
        computed: dict[Hashable, int] = {}
        known, computes = self._recency.keys, self._recency.computes
        for request, blocks in cached:
            request_id = request.request_id
            if request_id not in scheduled:
                self._not_computed(request, blocks)
            elif len(blocks) == 1 and (before := known.get(request_id)):  # as a decode does
                # Known are those alone that store. As `computes`, a call less.
                (block,) = blocks
                key = block._block_hash
                computed[key] = block.block_id
                before.append(key)
            elif not stores(request):
                self._leave_out(blocks)
            else:
                found = {block._block_hash: block.block_id for block in blocks}
                computes(request_id, found)
                if computed:
                    computed.update(found)
                else:
                    computed = found
        computed.pop(None, None)  # of the null block, or of one that has left the cache since
        return self._without_answers(computed) if self._answers else computed

    def can_wait(self, num_blocks: int) -> bool:
        """Whether so many blocks, which a step computes, may be stored some steps later.

        They are few, as decodes fill them, more are to come, and hardly any is handed out meanwhile
        even if its request ends: enough others are free. Not states, which are written to, nor what
        a connector may take back, nor where a block loses its memory once its request has ended.
        """
        running = len(self._view.scheduler.running)
        few = self._any_waits and 0 < running >= num_blocks
        return few and self._view.num_free_blocks() > self._blocks_ahead

    def in_place(self, cached: Iterable[tuple[Any, Sequence[Any]]]) -> dict[Hashable, int]:
        """The same of blocks whose bytes are in place."""
        found: dict[Hashable, int] = {}
        for request, blocks in cached:
            if stores(request):
                found.update({block.block_hash: block.block_id for block in blocks})
            else:
                self._leave_out(blocks)
        found.pop(None, None)  # as above
        return self._without_answers(found) if self._answers else found

    def session_went_on(self, session: Any) -> None:
        """A session has got more input, and may say otherwise than before whether it stores."""
        if not stores(session):
            self._recency.keys.pop(session.request_id, None)

    def clear(self) -> None:
        """What was cached since the last step is not computed."""
        if self._answers:
            self._answers.clear()

    def _without_answers(self, blocks: dict[Hashable, int]) -> dict[Hashable, int]:
        assert self._answers
        left_out = [block for block in blocks.values() if block in self._answers]
        self._manager.stats.decode += len(left_out)
        self._front.refuse(left_out)
        kept = {key: block for key, block in blocks.items() if block not in self._answers}
        self._answers.clear()
        return kept

    def _not_computed(self, request: Any, blocks: Sequence[Any]) -> None:
        """No step computes blocks of a request that was preempted within this very `schedule`.

        vLLM leaves their keys in its prefix cache, and the next request that hits them, that one
        itself mostly, reads what was there before. So they are taken out; not blocks that are in
        use, which were handed out since to a request that may fill and store them. Those that a
        connector fills have their keys, and are not stored.
        """
        if request.num_computed_tokens:
            self._front.refuse([block.block_id for block in blocks])
        else:
            self._uncache([block for block in blocks if not block.ref_cnt])

    def _leave_out(self, blocks: Iterable[Any]) -> None:
        """These of a request that does not store are counted, and not stored later either."""
        gpu_block_ids = [block.block_id for block in blocks if not block.is_null]
        self._manager.stats.opted_out += len(gpu_block_ids)
        self._front.refuse(gpu_block_ids)
