"""A prompt that ends with a block: its last block is loaded, and one token is computed.

vLLM's own prefix cache never gives a request its last token, nor the block that this ends: a prompt
of whole blocks that is known in full computes a whole block again, in a step that is no decode
(`KVCacheManager.get_computed_blocks` says why). Where the tier has that block, the step is changed
after it was scheduled: the request's own block, which was to be computed, is loaded, and only
the token whose logits are wanted is computed. What vLLM has noted of the request is what it would
have noted of such a step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from kvoffload_patch.integration.engine.adapters.vllm_scheduler import SchedulerView
from kvoffload_patch.integration.engine.requests.pace import Pace
from kvoffload_patch.tier.manager import OffloadManager

_Cached = tuple[Any, Sequence[Any]]  # request, blocks

# Who else counts the tokens of a step, or takes KV or what is kept of each token from it.
_OTHERS = ("connector", "ec_connector", "aux_output_connector")
# What a request may have besides tokens, or want of more than the last, by any release's name.
_LISTS = ("mm_features", "mm_kwargs", "mm_inputs")
_OBJECTS = ("prompt_embeds", "pooling_params")


class FullPromptHits:
    """Changes steps of one scheduler.

    Args:
        view: the scheduler. Nothing is changed where anybody else loads KV for it or counts the
            tokens of a step: a connector, speculative decoding, several KV cache groups; nor where
            layers keep a state.
        manager: slots and tickets.
        pace: how long loads take.
    """

    def __init__(self, view: SchedulerView, manager: OffloadManager, pace: Pace) -> None:
        self._scheduler, self._is_stale = view.scheduler, view.is_stale
        self._pace = pace
        self._manager = manager
        self._size = view.block_sizes[0]
        self._possible = (
            len(view.block_sizes) == 1
            and view.decode_tokens == 1
            and not view.state_groups  # a state is that after the prompt, not one token earlier
            and not any(getattr(self._scheduler, name, None) for name in _OTHERS)
        )

    def load(self, output: Any, cached: Iterable[_Cached], readers: list[str], alone: bool) -> None:
        """Load what requests that begin in this step would compute of their last block.

        Args:
            output: vLLM's `SchedulerOutput`.
            cached: blocks that were put into the GPU prefix cache within `schedule`.
            readers: requests for which this step loads inline; those that do now are added.
            alone: whether nothing else is on the bus. If not, only requests that wait for a load
                anyway take part.
        """
        if not self._possible or getattr(output, "new_block_ids_to_zero", None):
            return  # what the runner writes to a block could come after the load
        if self._pace.awaits_layers():
            return  # a step that computes the block begins before the loads are over
        blocks_of: dict[str, Sequence[Any]] = {}
        for new in output.scheduled_new_reqs:
            if not self._computes_last_block(new, output):
                continue
            if not (alone or new.req_id in readers):
                continue
            blocks_of = blocks_of or {request.request_id: found for request, found in cached}
            blocks = blocks_of.get(new.req_id)
            if blocks and self._manager.lookup(blocks[-1].block_hash):
                self._load(new, output, blocks[-1].block_id, blocks[-1].block_hash)
                readers.append(new.req_id)

    def _computes_last_block(self, new: Any, output: Any) -> bool:
        """Whether a request hits all but its last block, and computes that as a whole."""
        request_id, done = new.req_id, new.num_computed_tokens
        if not done or output.num_scheduled_tokens[request_id] != self._size:
            return False  # without any hit it may not be allowed to read the prefix cache
        if any(getattr(new, name, None) for name in _LISTS):
            return False
        if any(getattr(new, name, None) is not None for name in _OBJECTS):
            return False
        request = self._scheduler.requests[request_id]
        sampling = request.sampling_params
        if sampling is not None and sampling.prompt_logprobs is not None:
            return False  # of the block that vLLM computes; who asks may want to read the cache
        if getattr(request, "resumable", False):
            return False  # what is computed of a session that goes on need not be a hit
        return bool(request.num_tokens == done + self._size) and not self._is_stale(request)

    def _load(self, new: Any, output: Any, block: int, key: Hashable) -> None:
        ticket = self._manager.begin_load([key], [block])
        self._manager.expose_load(ticket)
        skipped = self._size - 1
        new.num_computed_tokens += skipped
        output.num_scheduled_tokens[new.req_id] -= skipped
        output.total_num_scheduled_tokens -= skipped
        request = self._scheduler.requests[new.req_id]
        if hasattr(request, "num_in_flight_tokens"):  # from 0.26 on
            request.num_in_flight_tokens -= skipped
