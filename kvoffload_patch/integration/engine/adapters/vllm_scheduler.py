"""What the tier reads and changes of vLLM's scheduler side, release by release.

What differs between releases is asked for by feature. Waiting queues: one up to 0.17,
`skipped_waiting` beside it from 0.18 to 0.30, `kv_holding_waiting` from 0.31 on.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

from kvoffload_patch.integration.engine.adapters.elastic_pool import adapter_of
from kvoffload_patch.integration.engine.adapters.vllm_events import KVEvents
from kvoffload_patch.integration.engine.adapters.vllm_experts import experts_of
from kvoffload_patch.integration.engine.adapters.vllm_groups import CacheGroups
from kvoffload_patch.integration.engine.adapters.vllm_lookup import PrefixLookup
from kvoffload_patch.integration.engine.adapters.vllm_lora import LoraNames
from kvoffload_patch.integration.engine.adapters.vllm_parts import PartKeys
from kvoffload_patch.integration.engine.adapters.vllm_pool import key_maker, keys_maker
from kvoffload_patch.integration.engine.adapters.vllm_sessions import key_mender
from kvoffload_patch.integration.engine.adapters.vllm_stats import PrefixStats
from kvoffload_patch.integration.engine.tuning import SCAN_MARGIN_REQUESTS

_SESSIONS = "num_waiting_for_streaming_input"


class SchedulerView:
    """One vLLM scheduler, its KV cache manager and its block pool.

    Args:
        scheduler: a `vllm.v1.core.sched.scheduler.Scheduler`, constructed.

    Attributes:
        adapter: of the block pool.
        groups: what its KV cache groups take of the GPU; block_sizes, state_groups, blocks_for,
            keys_in, decode_tokens and decode_blocks are theirs.
        in_order: whether vLLM looks up block after block of a prefix, and stops at the first miss.
        prefills: running requests of whose prompts a part is computed, by name.
        part_keys: of blocks in which hits may end; None where no hit ends within a block.
        prefix: vLLM's own prefix lookup.
        prefix_stats: vLLM's counters of hits.
        loras: the LoRA adapters that requests have named.
        mend_session: called with a session that is about to get more input.
        undo: called by `restore`, to put back what others have changed of vLLM's objects.
    """

    def __init__(self, scheduler: Any) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler = scheduler
        self.manager = scheduler.kv_cache_manager
        self.pool = self.manager.block_pool
        coordinator = self.manager.coordinator
        managers = coordinator.single_type_managers
        self.key = key_maker()
        self.keys_of = keys_maker(self.key)
        self.adapter = adapter = adapter_of(self.pool)
        self.hold, self.take_blocks, self.release = adapter.hold, adapter.take, adapter.free
        self.publish, self.free_after = adapter.publish, adapter.free_after
        self.gpu_lacks, self.gpu_lookup = adapter.lacks, adapter.lookup
        self.groups = groups = CacheGroups(scheduler, managers)
        self.block_sizes, self.state_groups = groups.block_sizes, groups.states
        self.blocks_for, self.decode_blocks = groups.blocks_for, groups.decode_blocks
        self.keys_in, self.decode_tokens = groups.keys_in, groups.decode_tokens
        self.in_order = [type(m).__name__ for m in managers] == ["FullAttentionManager"]
        self._parked_status = RequestStatus.WAITING_FOR_REMOTE_KVS
        self._running_status = RequestStatus.RUNNING
        self._open = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        grammar = "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"  # from 0.19 on
        known = grammar in RequestStatus.__members__
        self._grammar = RequestStatus[grammar if known else "WAITING_FOR_FSM"]
        active = hasattr(scheduler, "max_num_active_reqs")
        self.prefix = PrefixLookup(self.manager, experts_of(scheduler))
        self.undo: list[Callable[[], None]] = [self.prefix.restore]
        self.part_keys = PartKeys(self.pool, self.undo) if groups.parts else None
        self.prefix_stats, self.loras = PrefixStats(scheduler), LoraNames(scheduler)
        self._run_limit = "max_num_active_reqs" if active else "max_num_running_reqs"
        self._counts_sessions = _SESSIONS in type(scheduler).schedule.__code__.co_names
        self.mend_session = key_mender(scheduler)
        self._parked: dict[str, tuple[Any, Any]] = {}  # (request, status to restore) by name
        self._passed_over, self._front = list[str](), list[Any]()  # see `pass_over`
        self._uncapped_limit: int | None = None  # while admissions are capped
        queues = ("kv_holding_waiting", "skipped_waiting", "waiting")
        self._queues = [getattr(scheduler, name) for name in queues if hasattr(scheduler, name)]
        self.splits_prompts = bool(scheduler.scheduler_config.enable_chunked_prefill)
        self.prefills: dict[str, Any] = {}  # running, part of the prompt is computed; by name

    # Queues

    def has_waiting(self) -> bool:
        """Whether anything waits."""
        return any(map(len, self._queues))

    def is_paused(self) -> bool:
        """Whether new requests are kept waiting, whatever room there is."""
        state = getattr(self.scheduler, "pause_state", None)
        return state is not None and state.name != "UNPAUSED"

    def is_at_rest(self) -> bool:
        """Whether nothing runs, or is to run on until it ends."""
        state = getattr(self.scheduler, "pause_state", None)
        return not self.scheduler.running or (state is not None and state.name == "PAUSED_ALL")

    def waiting(self) -> Iterator[Any]:
        """Waiting requests in the order in which `schedule` looks at them; lazy."""
        queues = [
            queue if heap is None else _heap_order(heap)
            for queue in self._queues
            for heap in [getattr(queue, "_heap", None)]
        ]
        # From 0.18 to 0.30 with priorities: whichever of two queues has the first of all.
        merged = hasattr(self._queues[0], "_heap") and hasattr(self.scheduler, "skipped_waiting")
        for item in heapq.merge(*queues) if merged else chain(*queues):
            # Up to 0.11 the heap holds (priority, time of arrival, request).
            yield item[-1] if isinstance(item, tuple) else item

    def needs_lookup(self, request: Any) -> bool:
        """Whether `schedule` would look its prefix up: it waits for nothing but its turn."""
        if request.num_computed_tokens:
            return False
        # From 0.27 on one that was preempted is passed over until its tokens under way are there.
        stale = getattr(request, "num_stale_output_tokens", 0)
        if stale and not getattr(request, "drop_stale_output", False):
            return False
        if request.status in self._open:
            return True
        # Promoted and admitted within one schedule(): it is never seen as WAITING in between.
        structured = request.structured_output_request
        if request.status != self._grammar or not structured:
            return False
        return bool(structured.grammar) and not isinstance(structured.grammar, Exception)

    def is_stale(self, request: Any) -> bool:
        """Whether what the tier has by a request's keys may be of other weights."""
        lora = request.lora_request
        return lora is not None and self.loras.is_stale(lora.lora_name)

    @staticmethod
    def may_hit(request: Any) -> bool:
        """Whether a request may read the prefix cache; vLLM counts no queries of others."""
        skips = getattr(request, "skip_reading_prefix_cache", None)
        if skips is None:  # up to 0.11.0
            sampling = request.sampling_params
            skips = sampling is not None and sampling.prompt_logprobs is not None
        return not skips

    def resumes_without_lookup(self, request: Any) -> bool:
        """Whether `schedule` admits a request, if it can, that is past its lookup."""
        if request.request_id in self.scheduler.finished_recving_kv_req_ids:
            return True  # whatever it has received: up to 0.17 it counts as nothing, as a failure
        return bool(request.num_computed_tokens) and request.status in self._open

    def park(self, request: Any) -> None:
        """Make `schedule` pass over a request, until `unpark`."""
        self._parked[request.request_id] = request, request.status
        request.status = self._parked_status

    def pass_over(self, request: Any) -> None:
        """Make `schedule` pass over a request, which keeps its place; until `schedule_over`.

        Where vLLM has one queue that is not a heap, its front is remembered meanwhile.
        """
        if not self._passed_over and len(self._queues) == 1 and isinstance(self._queues[0], deque):
            looked_at = max(0, self.free_run_slots()) + SCAN_MARGIN_REQUESTS
            self._front = list(islice(self._queues[0], looked_at))
        self.park(request)
        self._passed_over.append(request.request_id)

    def _put_in_order(self, last: str) -> None:
        """The queue up to this request, as it was: 0.9.2 to 0.13 turn round what they skip."""
        queue, before, self._front = self._queues[0], self._front, []
        names = [request.request_id for request in before]
        left = before[: names.index(last) + 1]
        left = [request for request in left if request.status != self._running_status]
        if set(islice(queue, len(left))) == set(left):
            for place, request in enumerate(left):
                queue[place] = request

    def is_parked(self, request: Any) -> bool:
        """Whether a request waits for a load of the tier."""
        return request.request_id in self._parked

    def unpark(self, request_ids: Iterable[str] | None = None) -> None:
        """Undo `park` for those of these that are parked, or for all; each goes where it was.

        Args:
            request_ids: in the order of the queue.
        """
        back, names = [], self._parked if request_ids is None else request_ids
        for name in list(names):  # one that is aborted may be there twice
            request, status = self._parked.pop(name, (None, None))
            if request is not None and request.status == self._parked_status:
                request.status = status
                back.append(request)
        holding = getattr(self.scheduler, "kv_holding_waiting", None)
        if not holding or not back:
            return
        # From 0.31 on schedule() moves what waits for remote KV to the queue of those that
        # hold blocks, which is admitted even while new requests are paused.
        there = set(back).intersection(holding)
        if there:
            holding.remove_requests(there)
            # Put back one by one to the front of the queue, so the last comes first.
            for request in reversed(back):
                if request in there:
                    self.scheduler.waiting.prepend_request(request)

    # What a step can admit

    def free_run_slots(self) -> int:
        """How many more requests may run."""
        return int(getattr(self.scheduler, self._run_limit)) - self._run_slots_taken()

    def _run_slots_taken(self) -> int:
        # From 0.25 on a session that waits for its next input keeps its slot.
        sessions = getattr(self.scheduler, _SESSIONS) if self._counts_sessions else 0
        return len(self.scheduler.running) + int(sessions)

    def cap_admissions(self, admitted: int) -> None:
        """Let `schedule` admit so many waiting requests and no more, until `schedule_over`.

        Those behind have not been looked up, or wait for room that is spoken for.
        """
        limit = getattr(self.scheduler, self._run_limit)
        self._uncapped_limit = limit
        closed = min(limit, self._run_slots_taken() + admitted)
        setattr(self.scheduler, self._run_limit, closed)

    def schedule_over(self) -> None:
        """Undo `cap_admissions`, `give` and `pass_over`."""
        self.prefix.given.clear()
        if self._passed_over:
            if self._front:
                self._put_in_order(self._passed_over[-1])
            self.unpark(self._passed_over)
            self._passed_over.clear()
        if self._uncapped_limit is not None:
            setattr(self.scheduler, self._run_limit, self._uncapped_limit)
            self._uncapped_limit = None

    def note_scheduled(self, output: Any) -> None:
        """`schedule` has returned this output: remember the prompts that it leaves unfinished.

        O(requests that begin or resume in the step and prompts under way). From 0.23 on vLLM keeps
        such a set itself, which holds a connector's loads as well.
        """
        requests = self.scheduler.requests
        for new in output.scheduled_new_reqs:
            self.prefills[new.req_id] = requests[new.req_id]
        for request_id in _resumed(output.scheduled_cached_reqs):
            self.prefills[request_id] = requests[request_id]
        for request_id, request in list(self.prefills.items()):
            # To be asked now: the step's token makes a finished prompt one token longer.
            done = request.num_computed_tokens >= request.num_tokens
            if done or request.status != self._running_status:
                del self.prefills[request_id]

    def demand_of_running(self) -> tuple[int, int]:
        """(tokens, blocks) that running requests take in this step, at most; O(prompts under way).

        Decodes are bounded by their number, prompts of which a part is computed are counted.
        """
        num_running = len(self.scheduler.running)
        blocks = num_running * self.decode_blocks
        tokens = num_running * self.decode_tokens
        limit = self.prompt_tokens_in_step() if self.prefills else 0
        for request in self.prefills.values():
            if request.status != self._running_status:
                continue  # preempted or gone since
            todo = min(request.num_tokens - request.num_computed_tokens, limit)
            tokens += todo - self.decode_tokens  # it is counted as a decode above
            blocks += self.groups.new_blocks(request, todo)
        return tokens, blocks

    def prompt_tokens_in_step(self) -> int:
        """Tokens that a step gives to one prompt, at most."""
        scheduler = self.scheduler
        config, most = scheduler.scheduler_config, int(scheduler.max_num_scheduled_tokens)
        threshold = int(config.long_prefill_token_threshold)
        adaptive = getattr(scheduler, "adaptive_long_prefill_threshold", None)
        if threshold > 0 and adaptive is not None:  # from 0.31 on
            requests = len(scheduler.running) + sum(map(len, self._queues))
            if requests <= 1:
                return most
            if adaptive:
                threshold = max(threshold, config.max_num_batched_tokens // requests)
        return min(threshold, most) if threshold > 0 else most

    def count_blocks_for_running(self) -> int:
        """Blocks that running requests take in this step; O(running requests).

        For when the bound of `demand_of_running` is too coarse to decide by.
        """
        limit, blocks = self.prompt_tokens_in_step(), 0
        for request in self.scheduler.running:
            todo = request.num_tokens_with_spec - request.num_computed_tokens
            todo += getattr(request, "num_output_placeholders", 0)
            blocks += self.groups.new_blocks(request, min(todo, limit))
        return blocks

    def watermark_blocks(self) -> int:
        """Blocks that vLLM keeps free when it admits a request beside others; from 0.24 on."""
        return int(getattr(self.manager, "watermark_blocks", 0))

    def tokens_to_fit(self, request: Any, hit_tokens: int) -> int:
        """Tokens whose blocks must be free for `schedule` to admit a request."""
        if getattr(self.scheduler, "scheduler_reserve_full_isl", False):
            return int(request.num_tokens)
        begins = self.groups.computed_from(hit_tokens)
        first_step = begins + self.scheduler.max_num_scheduled_tokens
        return min(int(request.num_tokens), int(first_step))

    # Events

    def kv_events(self, needed: Callable[[Hashable], bool]) -> KVEvents | None:
        """The stream of KV cache events, if it is on; until `restore`.

        Args:
            needed: as `KVEvents` has it.
        """
        if not self.pool.enable_kv_cache_events:
            return None
        lookup, managers = self.gpu_lookup, self.manager.coordinator.single_type_managers
        names = [type(manager).__name__ for manager in managers]
        whole = [at for at, name in enumerate(names) if name == "FullAttentionManager"]
        size = getattr(self.pool, "hash_block_size", None)
        hashed = next((at for at in whole if self.block_sizes[at] == size), None)
        key = None if hashed is None else lambda block_hash: self.key(block_hash, hashed)
        events = KVEvents(self.pool, needed, lambda key: lookup()(key) is not None, whole, key)
        self.adapter.on_publish = events.loaded
        self.undo.append(events.withdraw)
        return events

    # Blocks

    def num_free_blocks(self) -> int:
        """Free GPU blocks, cached ones that may be evicted included."""
        return int(self.pool.get_num_free_blocks())

    def cached_key(self, gpu_block_id: int) -> Hashable:
        """The key under which a GPU block is in the prefix cache; None if it is not."""
        key: Hashable = self.pool.blocks[gpu_block_id]._block_hash  # where its property finds it
        return key

    def hashes_blocks(self) -> bool:
        """Whether a request's first hash is that of its first block; pools say it from 0.12 on."""
        hash_size = getattr(self.pool, "hash_block_size", None)
        return self.in_order and hash_size == self.block_sizes[0]

    def still_cached(self, gpu_block_id: int, key: Hashable) -> bool:
        """Whether a GPU block is in the prefix cache under this key."""
        found: bool = self.pool.blocks[gpu_block_id]._block_hash == key  # no call for each
        return found

    def block_tables(self, request_id: str) -> tuple[list[int], ...]:
        """The GPU blocks of a running request, in order, for each KV cache group."""
        tables: tuple[list[int], ...] = self.manager.get_block_ids(request_id)
        return tables

    # The end

    def restore(self) -> None:
        """Undo everything that the tier has changed of vLLM's objects, whatever state it is in.

        Every copy must be done. To be called outside `schedule`, whose queues it changes.
        """
        self.schedule_over()
        self.unpark()
        while self.undo:
            self.undo.pop()()
        self.adapter.free_all()
        self.prefix_stats.restore()


def _heap_order(heap: Sequence[Any]) -> Iterator[Any]:
    """The items of a binary heap in order, O(log k) for the k-th, without copying it."""
    front = [(heap[0], 0)] if heap else []
    while front:
        item, at = heapq.heappop(front)
        yield item
        for child in (2 * at + 1, 2 * at + 2):
            if child < len(heap):
                heapq.heappush(front, (heap[child], child))


def _resumed(requests: Any) -> Iterable[str]:
    """Requests that begin again in a step, after `SchedulerOutput.scheduled_cached_reqs`."""
    if isinstance(requests, list):  # up to 0.9.1
        return [one.req_id for one in requests if one.resumed_from_preemption]
    resumed: Iterable[str] | None = getattr(requests, "resumed_req_ids", None)
    if resumed is None:  # up to 0.11.0
        resumed = [n for n, yes in zip(requests.req_ids, requests.resumed_from_preemption) if yes]
    return resumed
