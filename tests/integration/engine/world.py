"""The scheduler's side without an engine: vLLM's KV cache manager and requests, and our tier.

The scheduler is a small object with what the tier reads; all below it is vLLM's own, and the
hooks stand on the scheduler and the pool as they do in an engine.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

from kvoffload_patch.config import Settings
from kvoffload_patch.integration.engine import step_hooks
from kvoffload_patch.integration.engine.adapters.vllm_scheduler import SchedulerView
from kvoffload_patch.integration.engine.breaker import Breaker
from kvoffload_patch.integration.engine.requests.lookup import StandInPool
from kvoffload_patch.integration.engine.tier import SchedulerTier
from kvoffload_patch.integration.patch_table.points import POINTS, VLLM
from kvoffload_patch.integration.protocol import PLAN, TIER
from kvoffload_patch.patching import Decision, ObjectHooks, decide, installed_version
from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.policies import POLICIES

BLOCK = 4
_names = itertools.count()

init_none_hash(sha256)
_hasher = get_request_block_hasher(BLOCK, sha256)


def make_request(tokens: list[int], name: str = "", **more: Any) -> Request:
    """A request of vLLM's, with the hashes of its full blocks."""
    return Request(
        request_id=name or f"request-{next(_names)}",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=8),
        pooling_params=None,
        block_hasher=_hasher,
        **more,
    )


def prompt(blocks: int, seed: int = 0, tail: int = 1) -> list[int]:
    """A prompt of so many full blocks, and ``tail`` tokens behind them."""
    return list(range(1000 * seed, 1000 * seed + blocks * BLOCK + tail))


def make_manager(num_blocks: int) -> KVCacheManager:
    """vLLM's KV cache manager with one group of full attention."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    wanted = {
        "kv_cache_config": config,
        "max_model_len": 4096,
        "scheduler_block_size": BLOCK,
        "hash_block_size": BLOCK,
        "enable_caching": True,
        "log_stats": True,
    }
    known = inspect.signature(KVCacheManager).parameters
    return KVCacheManager(**{name: value for name, value in wanted.items() if name in known})


class FakeScheduler:
    """What the tier reads of a scheduler; ``holding`` names the second waiting queue."""

    def __init__(
        self,
        manager: KVCacheManager,
        holding: str = "kv_holding_waiting",
        policy: str = "fcfs",
        max_running: int = 64,
        max_tokens: int = 4096,
    ) -> None:
        self.kv_cache_manager = manager
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.scheduler_config = SimpleNamespace(
            enable_chunked_prefill=True, long_prefill_token_threshold=0
        )
        self.waiting = create_request_queue(SchedulingPolicy(policy))
        self.holding = create_request_queue(SchedulingPolicy(policy))
        setattr(self, holding, self.holding)
        self.max_num_running_reqs = max_running
        self.max_num_scheduled_tokens = max_tokens
        self.num_lookahead_tokens = 0
        self.num_waiting_for_streaming_input = 0
        self.finished_recving_kv_req_ids: set[str] = set()
        self.pause_state = PauseState.UNPAUSED
        self.vllm_config = SimpleNamespace(lora_config=None)
        self.connector = None
        self.connector_prefix_cache_stats = None
        self.log_stats = True

    def schedule(self) -> int:
        """As vLLM's from 0.25 on, sessions that wait for input take part in admission."""
        return len(self.running) + self.num_waiting_for_streaming_input


def step_output(scheduled: dict[str, int]) -> SimpleNamespace:
    """What the tier reads of a `SchedulerOutput` in which no prompt is computed in parts."""
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
        finished_req_ids=set(),
        num_common_prefix_blocks=[0],
    )


class FakeRanks:
    """Ranks that copy nothing and are done when they are told to."""

    load_ms_per_block = 1.0
    copies_overlap = True
    compares = False
    told_of_all = True
    sharing = 1
    overlap = 0.0

    def __init__(self) -> None:
        self.calls: list[str] = []

    def drain(self) -> bool:
        self.calls.append("drain")
        return True

    def step_failure(self) -> str:
        return ""

    def close(self) -> None:
        self.calls.append("close")


class World:
    """One scheduler with a tier, stepped by hand.

    Attributes:
        admissible: requests that the last step might admit; None if it was not capped.
    """

    def __init__(
        self,
        num_blocks: int = 33,
        load_mode: str = "inline",
        num_slots: int = 256,
        store: str = "auto",
        growing: bool = False,
        **scheduler: Any,
    ) -> None:
        self.manager = make_manager(num_blocks)
        self.scheduler = FakeScheduler(self.manager, **scheduler)
        self.pool = self.manager.block_pool
        self.view = SchedulerView(self.scheduler)
        settings = Settings(load_mode=load_mode, store=store)
        self.offload = OffloadManager(
            num_slots, POLICIES[settings.eviction], growing, settings.store,
            min_uses=settings.store_min_uses,
        )  # fmt: skip
        self.ranks = FakeRanks()
        self.time = 0.0
        self.tier = SchedulerTier(self.view, self.offload, self.ranks, settings, lambda: self.time)
        self.admissible: int | None = None
        setattr(self.scheduler, TIER, self.tier)
        self.hooks = ObjectHooks(_pool_points(), {"BlockPool": self.pool})
        self.breaker = Breaker(self.view, self.offload, self.tier, self.ranks, self.hooks)
        self.hooks.install(self.breaker)

    # Requests

    def add(self, tokens: list[int], **more: Any) -> Request:
        """A request that waits."""
        request = make_request(tokens, **more)
        self.scheduler.waiting.add_request(request)
        return request

    def admit(self, request: Request) -> int:
        """What `schedule` does with a request that fits; returns the tokens to compute."""
        blocks, hit, _ = self.manager.get_computed_blocks(request)
        todo = request.num_tokens - hit
        if getattr(request, "prefill_stats", None) is not None:
            request.prefill_stats.set(request.num_tokens, hit, 0)
        else:
            request.num_cached_tokens = hit
        assert self.manager.allocate_slots(request, todo, hit, blocks) is not None
        for queue in (self.scheduler.waiting, self.scheduler.holding):
            if request in iter(queue):
                queue.remove_request(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = request.num_tokens
        self.scheduler.running.append(request)
        return todo

    def end(self, request: Request) -> None:
        """A running request has ended."""
        self.scheduler.running.remove(request)
        self.manager.free(request)

    # Steps

    def step(self, *admitted: Request, body: Callable[[], Any] | None = None) -> Any:
        """One `schedule` that admits these requests; returns the plan that rides on its output.

        Args:
            admitted: waiting requests.
            body: called within `schedule` before the requests are admitted.
        """

        limit = self.scheduler.max_num_running_reqs

        def schedule() -> SimpleNamespace:
            now = self.scheduler.max_num_running_reqs
            self.admissible = None if now == limit else now - len(self.scheduler.running)
            if body is not None:
                body()
            scheduled = {request.request_id: self.admit(request) for request in admitted}
            return step_output(scheduled)

        output = step_hooks.schedule(schedule, self.hooks.live, self.breaker)()
        return getattr(output, PLAN, None)

    def all_done(self) -> None:
        """The ranks have done all that was planned."""
        self.tier.on_result(self.offload.drained())

    # Content

    def hash_keys(self, request: Request) -> list[Any]:
        """The keys of a request's full blocks."""
        return [self.view.key(block_hash, 0) for block_hash in request.block_hashes]

    def gpu_hit(self, request: Request) -> int:
        """Tokens of a request's prefix in the GPU's prefix cache."""
        return self.manager.get_computed_blocks(request)[1]

    def flush_gpu(self) -> None:
        """Everything that the GPU's prefix cache has and nobody uses is overwritten."""
        self.pool.free_blocks(self.pool.get_new_blocks(self.pool.get_num_free_blocks()))

    def only_in_cpu(self, tokens: list[int], **more: Any) -> None:
        """Compute a prompt, store it, and lose it on the GPU."""
        request = self.add(tokens, **more)
        self.step(request)
        self.all_done()
        self.end(request)
        self.flush_gpu()
        self.step()
        assert self.gpu_hit(request) == 0
        assert all(self.offload.lookup(key) for key in self.hash_keys(request))


class LookUps:
    """Counts the lookups of a test."""

    def __init__(self, monkeypatch: Any) -> None:
        self.requests: list[Request] = []
        self.blocks = 0
        look_up, in_order = StandInPool.look_up, StandInPool._in_order

        def counted_look_up(pool: StandInPool, request: Request, max_tier_hits: int) -> Any:
            self.requests.append(request)
            return look_up(pool, request, max_tier_hits=max_tier_hits)

        def counted_in_order(pool: StandInPool, *args: Any) -> Callable[..., Any]:
            get_cached_block = in_order(pool, *args)

            def counted_get(*args: Any) -> Any:
                self.blocks += 1
                return get_cached_block(*args)

            return counted_get

        monkeypatch.setattr(StandInPool, "look_up", counted_look_up)
        monkeypatch.setattr(StandInPool, "_in_order", counted_in_order)

    def take(self) -> tuple[list[Request], int]:
        """Requests looked up and blocks asked for since the last call."""
        taken = self.requests, self.blocks
        self.requests, self.blocks = [], 0
        return taken


@cache
def _pool_points() -> Decision:
    """The points of the block pool; the scheduler here is not vLLM's."""
    decision = decide(VLLM, POINTS, installed_version(VLLM))
    points = tuple(p for p in decision.points if p.attribute.startswith("BlockPool."))
    return replace(decision, points=points)
