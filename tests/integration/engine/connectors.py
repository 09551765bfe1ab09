"""A KV connector for `Mini`: it knows prompts, and fills the blocks of those who ask for them."""

from __future__ import annotations

import random
from typing import Any

from integration.engine.mini import BLOCK, Mini
from integration.engine.random_shapes import MAX_TOKENS
from scheduler_half.device import _GROUP, value_after
from scheduler_half.states import KINDS
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.v1.core.sched import scheduler as vllm_scheduler
from vllm.v1.outputs import KVConnectorOutput

WRONG = [7] * BLOCK
_MARGIN = 3  # blocks of a group
# By the name that the scheduler asks for: over sources each import has a stand-in of its own.
_ManyGroups = getattr(vllm_scheduler, "SupportsHMA", object)


class Connector(KVConnectorBase_V1):
    """Loads within the step or beside it, for every KV cache group.

    Args:
        mini: whose scheduler it is attached to.
        beside: loads go on beside the step, until `fill`.
        known: the prompts.
    """

    def __init__(self, mini: Mini, beside: bool, *known: list[int]) -> None:
        self._mini = mini
        self._beside = beside
        self.known = list(known)
        self.fails = False
        self._loads: dict[str, tuple[list[int], list[list[int]], int]] = {}
        self.filled: dict[str, list[int]] = {}
        mini.scheduler.connector = self

    @property
    def loading(self) -> list[str]:
        """Requests whose blocks are not filled yet."""
        return list(self._loads)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        found = self._blocks_known(request.prompt_token_ids) * BLOCK - num_computed_tokens
        return max(0, found), self._beside and found > 0

    def _blocks_known(self, tokens: list[int]) -> int:
        known = [len(one) for one in self.known if tokens[: len(one)] == one]
        return min(max(known, default=0), len(tokens) - 1) // BLOCK

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            tokens = list(request.prompt_token_ids)
            end = self._blocks_known(tokens)
            tables = [list(table)[:end] for table in blocks.get_block_ids()]
            self._loads[request.request_id] = (tokens, tables, end - num_external_tokens // BLOCK)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if not self._beside:
            for name in self.loading:
                self.fill(name)
        return KVConnectorMetadata()

    def fill(self, name: str) -> None:
        """A load arrives; of one that fails, only the first block is right."""
        tokens, tables, first = self._loads.pop(name)
        values, value = [], 0
        for token in tokens:
            value = value_after(value, token)
            values.append(value)
        self.filled[name] = []
        for group, table in enumerate(tables):
            keeps_state = self._mini.device._windows[group] in KINDS
            for at in range(first, len(table)):
                if not table[at]:
                    continue  # the null block: nobody looks at it
                right = [one + group * _GROUP for one in values[at * BLOCK : (at + 1) * BLOCK]]
                right = right[-1:] * BLOCK if keeps_state else right
                wrong = self.fails and at > first
                self._mini.device.kv[table[at]] = list(WRONG) if wrong else right
                self.filled[name].append(table[at])

    def start_load_kv(self, *_: Any, **__: Any) -> None: ...
    def wait_for_layer_load(self, *_: Any) -> None: ...
    def save_kv_layer(self, *_: Any, **__: Any) -> None: ...
    def wait_for_save(self) -> None: ...
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return False, None

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return False

    def get_external_cache_hit_sources(self, *_: Any) -> None:
        """Nobody asks where its hits are from."""

    def has_pending_push_work(self) -> bool:
        return False

    def has_pending_block_frees(self) -> bool:
        return False

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return (0,)

    def take_events(self) -> tuple[()]:
        return ()


class RandomConnector(Connector, _ManyGroups):  # type: ignore[misc, valid-type]
    """One whose loads beside the step arrive when it likes, and which has what it was shown.

    Blocks are filled when the step has begun: behind the copies that it waits for. It has nothing
    where the GPU is nearly full. There vLLM's own scheduler ends, with and without a tier, because
    it does not count the block of a state that a connector brings, and requests that hold what a
    connector has brought wait for each other.

    Of one KV cache group it fails to fill some, and says so with the output of that step. What vLLM
    does then is the seed's: it computes them again, or it ends the requests. In half of the runs it
    keeps blocks of requests that have ended for some steps, as one that sends them does.

    Args:
        mini: whose scheduler it is attached to.
        seed: of what it does.

    Attributes:
        loads: of which blocks were filled.
        failed: of these, how many were filled in part.
        sent: requests whose blocks it has kept when they had ended.
    """

    def __init__(self, mini: Mini, seed: int) -> None:
        self._rng = random.Random(f"connector {seed}")
        super().__init__(mini, self._rng.random() < 0.5 and _can_wait(mini))
        self.loads = self.failed = self.sent = 0
        self._sends, self._sending = seed % 4 > 1, list[str]()
        if hasattr(mini.scheduler, "defer_block_free"):
            mini.scheduler.defer_block_free = mini.in_flight > 1 and seed % 3 > 0
        self._ends = seed % 2 == 0
        self._may_fail = _can_fail(mini, self._ends)
        self._invalid = set[int]()
        self._arrived = set[str]()
        self._take_part(mini)

    def _take_part(self, mini: Mini) -> None:
        """In the steps of the engine and of its device."""
        self._end_step = mini.end_step
        mini.end_step = self._forget  # type: ignore[method-assign]
        self._prepare, self._begin_step = mini.device._prepare, mini.begin_step
        mini.device._prepare = self._bring  # type: ignore[method-assign]
        mini.begin_step = self._say  # type: ignore[method-assign]

    def show(self, prompt: list[int]) -> None:
        """A prompt that it has from now on, or its beginning; often it has nothing of it."""
        if self._rng.random() < 0.5:
            blocks = self._rng.randrange(1 + len(prompt) // BLOCK)
            self.known.append(prompt[: blocks * BLOCK])

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        if not self._has_room(request) or num_computed_tokens and _takes_hits(self._mini):
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def _has_room(self, request: Any) -> bool:
        scheduler, groups = self._mini.scheduler, len(self._mini.device._windows)
        running = {one.request_id for one in scheduler.running}
        # From 0.27 on vLLM passes over one that was preempted with a step under way. The next step
        # looks at it first, and those behind it keep what was loaded for them.
        holding = [
            one
            for one in scheduler.requests.values()
            if one.request_id not in running and one is not request
            if one.num_computed_tokens or getattr(one, "num_stale_output_tokens", 0)
        ]
        wanted = sum(groups * (one.num_tokens // BLOCK + _MARGIN) for one in [request, *holding])
        by_priority = self._mini.config.scheduler_config.policy == "priority"
        if self._beside and (by_priority or not hasattr(scheduler, "skipped_waiting")):
            # Up to 0.17, and with priorities in all releases, vLLM may look first at one that does
            # not fit. Those behind it wait, and keep what was loaded for them. So the longest one
            # must fit beside all that.
            kept = [one for one in scheduler.requests if one not in running]
            held = sum(len(table) for one in kept for table in self._mini.view.block_tables(one))
            longest = groups * (MAX_TOKENS // BLOCK + _MARGIN)
            if self._mini.pool.num_gpu_blocks <= held + wanted + longest:
                return False
        return bool(self._mini.pool.get_num_free_blocks() >= wanted)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def _bring(self, scheduled: Any) -> None:
        # Up to 0.31 vLLM takes blocks of those that have ended for some that all running have.
        if self._sending or getattr(self._mini.scheduler, "deferred_frees", None):
            scheduled.num_common_prefix_blocks = None
        self._prepare(scheduled)
        for name in self.loading:
            if not self._beside or self._rng.random() < 0.4:
                self.fails = self._may_fail and self._rng.random() < 0.3
                self.fails = self.fails and self._is_told(scheduled)
                self.fill(name)
                self.loads += 1
                self._arrived |= {name} if self._beside else set()
                if self.fails:
                    self._invalid |= set(self.filled[name][1:])
                    self.failed += 1

    def _is_told(self, scheduled: Any) -> bool:
        """Whether the release looks for what was not filled among all that this step reads.

        From 0.11.1 to 0.18 it looks, of a request's blocks, at as many as it hit when it was first
        admitted. One that was preempted and begins again goes on with blocks that were not filled.
        """
        finds = type(self._mini.scheduler)._update_requests_with_invalid_blocks
        if "num_scheduled_tokens" in finds.__code__.co_varnames:
            return True
        requests = self._mini.scheduler.requests
        return not any(requests[one].num_preemptions for one in scheduled.num_scheduled_tokens)

    def _say(self) -> Any:
        scheduled = self._begin_step()
        arrived, self._arrived = self._arrived, set()
        invalid, self._invalid = self._invalid, set()
        sent = {name for name in self._sending if self._rng.random() < 0.3}
        self._sending = [name for name in self._sending if name not in sent]
        if arrived or invalid or sent:
            done = {"finished_sending": sent or None, "finished_recving": arrived or None}
            said = KVConnectorOutput(**done, invalid_block_ids=invalid)
            self._mini.queue[0][1].kv_connector_output = said
            if invalid and self._ends:  # vLLM ends requests that it has not answered
                self._mini.counts = dict.fromkeys(self._mini.counts, 0)
        return scheduled

    def _forget(self) -> None:
        """Take in the oldest output; tokens that vLLM has dropped are not the model's."""
        self._end_step()
        if self._may_fail and not self._ends:
            for name, sequence in self._mini.device._sequences.items():
                if name in self._mini.scheduler.requests:
                    sequence.tokens = self._mini._tokens(name)

    def over(self) -> None:
        """Step until everything is sent.

        Up to 0.21 vLLM makes no step for blocks that are sent alone: the next request's step tells.
        """
        while self._sending or self._mini.queue:
            if not (self._mini.queue or self._mini.scheduler.has_requests()):
                self._mini.begin_step()
            self._mini.step()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        sends = self._sends and request.status.name == "FINISHED_LENGTH_CAPPED"
        if sends := sends and self._rng.random() < 0.5:
            self._sending.append(request.request_id)
            self.sent += 1
        return sends, None

    request_finished_all_groups = request_finished


def _takes_hits(mini: Mini) -> bool:
    """Whether vLLM may hand out blocks that the same request has hit in another group.

    From 0.14 to 0.23 it takes a group's blocks for what a connector brings before it references the
    next group's hits. So a block is in two tables, and answers are wrong without a tier, too
    (vLLM's issue 33775).
    """
    coordinator = mini.kv_manager.coordinator
    manager = coordinator.single_type_managers[0]
    one_by_one = hasattr(coordinator, "allocate_new_computed_blocks")
    one_by_one = one_by_one and not hasattr(manager, "allocate_external_computed_blocks")
    return one_by_one and len(mini.device._windows) > 1


def _can_wait(mini: Mini) -> bool:
    """Whether the release takes loads beside the step.

    Up to 0.17 what has arrived is counted by the blocks of the only group; beside a connector vLLM
    has several there only if it is told to (`--no-disable-hybrid-kv-cache-manager`).
    """
    counts = type(mini.scheduler)._update_waiting_for_remote_kv
    one_group = "get_block_ids" in counts.__code__.co_names
    return not one_group or len(mini.device._windows) == 1


def _can_fail(mini: Mini, ends: bool) -> bool:
    """Whether the release takes blocks that were not filled, as the run has it do.

    vLLM answers wrongly by itself where it preempts a request before it is told, which takes
    several steps under way, and where a request goes on upon blocks that another one computes again
    in several steps.
    """
    can = hasattr(mini.scheduler, "recompute_kv_load_failures")
    at_once = not mini.config.scheduler_config.long_prefill_token_threshold
    can = can and mini.in_flight == 1 and (ends or at_once)
    if can:
        mini.scheduler.recompute_kv_load_failures = not ends
    return can and len(mini.device._windows) == 1 and mini.device._windows[0] not in KINDS
