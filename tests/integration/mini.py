"""vLLM's own scheduler, synchronous or not, with a tier, over a model that is arithmetic.

The KV value of a token is made of the token and of the value before it, read from the block it
is said to be in; the next token is made of the last value. So one wrong block anywhere in a
prefix is a wrong token. Loads and stores move those values, and fail when they are told to.
"""

from __future__ import annotations

import inspect
import json
import tempfile
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvoffload_patch.config import Settings
from kvoffload_patch.integration import scheduler_hooks as hooks
from kvoffload_patch.integration.adapters import PLAN, RESULT, TIER, SchedulerView
from kvoffload_patch.integration.scheduler_tier import SchedulerTier
from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.plan import CopyBatch, TransferResult

BLOCK = 16
VOCABULARY = 30_000
_MODULUS = (1 << 61) - 1
_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32",
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 32_000,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip
_SCHEDULER_HOOKS = ("schedule", "update_from_output", "finish_requests", "reset_prefix_cache")
_POOL_HOOKS = ("cache_full_blocks", "get_new_blocks", "evict_blocks")


def value_after(value: int, token: int) -> int:
    """The KV value of a token behind a value."""
    return (value * 1_000_003 + token + 1) % _MODULUS


def answer(prompt: list[int], count: int) -> list[int]:
    """What the model answers without any cache."""
    value, tokens = 0, []
    for token in prompt:
        value = value_after(value, token)
    for _ in range(count):
        tokens.append(value % VOCABULARY)
        value = value_after(value, tokens[-1])
    return tokens


class FakeRanks:
    """One rank; `Mini` carries out its plans."""

    num_ranks = 1

    def __init__(self, load_ms_per_block: float = 1.0, copies_overlap: bool = True) -> None:
        self.load_ms_per_block, self.copies_overlap = load_ms_per_block, copies_overlap

    def drain(self) -> None:
        """Copies are made when they are submitted."""


class Mini:
    """An engine core in small.

    Args:
        fails: called with ("load" or "store", ticket): whether that copy fails.
        in_flight: steps under way at once; more than one takes the asynchronous scheduler.
        late: outputs after which a copy is reported as done.
        settings: of the tier.
        blocks: GPU blocks, the null block included.
    """

    def __init__(
        self,
        fails: Callable[[str, int], bool] = lambda direction, ticket: False,
        in_flight: int = 1,
        late: int = 0,
        blocks: int = 25,
        num_slots: int = 400,
        ranks: FakeRanks | None = None,
        **settings: Any,
    ) -> None:
        self.fails, self.in_flight, self.late = fails, in_flight, late
        self.scheduler = make_scheduler(in_flight > 1, blocks)
        self.view = SchedulerView(self.scheduler)
        self.manager = OffloadManager(num_slots)
        ranks = ranks or FakeRanks()
        self.tier = SchedulerTier(self.view, self.manager, ranks, Settings(**settings))
        for owner, names in ((self.scheduler, _SCHEDULER_HOOKS), (self.view.pool, _POOL_HOOKS)):
            setattr(owner, TIER, self.tier)
            for name in names:
                setattr(owner, name, _hooked(getattr(hooks, name), owner, name))
        self.kv = [[0] * BLOCK for _ in range(blocks)]
        self.slots = [[0] * BLOCK for _ in range(num_slots)]
        self.answers: dict[str, list[int]] = {}
        self.prompts: dict[str, list[int]] = {}
        self.plans: list[Any] = []
        self.hits: dict[str, int] = {}  # tokens cached when a request was admitted, in that order
        self.queue: deque[tuple[Any, Any, Any]] = deque()
        self._tokens: dict[str, list[int]] = {}  # as the runner knows them
        self._done: deque[tuple[int, int]] = deque([(0, 0)] * late)
        self._failed: tuple[list[int], list[int]] = ([], [])

    # What a user does

    def add(self, prompt: list[int], count: int = 4) -> str:
        """Ask for ``count`` tokens; returns the request's name."""
        name = f"request-{len(self.prompts)}"
        sampling = SamplingParams(max_tokens=count, ignore_eos=True)
        request = Request(name, prompt, sampling, None, block_hasher=_hasher())
        self.prompts[name], self.answers[name] = prompt, []
        self.scheduler.add_request(request)
        return name

    def only_in_cpu(self, *prompts: list[int]) -> None:
        """Compute prompts, store them, and lose them on the GPU."""
        for prompt in prompts:
            self.add(prompt, count=1)
            self.run()
        self.tier.on_result(self.manager.drained())
        pool = self.view.pool
        pool.free_blocks(pool.get_new_blocks(pool.get_num_free_blocks()))

    def run(self, steps: int = 10_000) -> None:
        """Step until every request has its answer."""
        while self.scheduler.has_unfinished_requests() or self.queue:
            assert steps, "the requests do not come to an end"
            steps -= 1
            self.step()

    def check(self) -> None:
        """Every token that came out is right, and all came out that were asked for."""
        for name, tokens in self.answers.items():
            request = self.scheduler.requests.get(name)
            assert request is None, f"{name} is still there"
            assert tokens == answer(self.prompts[name], len(tokens)), name

    # A step

    def step(self) -> None:
        """As `EngineCore.step_with_batch_queue`: schedule, and take in the oldest output."""
        if self.scheduler.has_requests():
            self.begin_step()
            if len(self.queue) < self.in_flight and self.queue[0][0].num_scheduled_tokens:
                return
        self.end_step()

    def begin_step(self) -> Any:
        """Schedule a step and carry it out on the device."""
        scheduled = self.scheduler.schedule()
        for new in scheduled.scheduled_new_reqs:
            self.hits.setdefault(new.req_id, new.num_computed_tokens)
        plan = getattr(scheduled, PLAN, None)
        if plan is not None:
            self.plans.append(plan)
            self._forget_failures(plan)
            for load in plan.loads:
                self._copy("load", load, self.slots, load.cpu_slots, self.kv, load.gpu_block_ids)
        output = self._compute(scheduled)
        if plan is not None and plan.store:
            store = plan.store
            self._copy("store", store, self.kv, store.gpu_block_ids, self.slots, store.cpu_slots)
        self.queue.appendleft((scheduled, output, self._result(plan)))
        return scheduled

    def end_step(self) -> None:
        """Take in the oldest output."""
        scheduled, output, result = self.queue.pop()
        setattr(output, RESULT, result)
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            for one in outputs.outputs:
                self.answers[one.request_id].extend(one.new_token_ids)

    # The device

    def _compute(self, scheduled: Any) -> ModelRunnerOutput:
        ids = list(scheduled.num_scheduled_tokens)
        fresh = {new.req_id for new in scheduled.scheduled_new_reqs}
        fresh |= set(scheduled.scheduled_cached_reqs.resumed_req_ids)
        sampled: list[list[int]] = []
        for name in ids:
            request = self.scheduler.requests[name]
            if name in fresh:
                self._tokens[name] = list(request.all_token_ids)
            count = scheduled.num_scheduled_tokens[name]
            sampled.append(self._forward(name, request.num_computed_tokens - count, count))
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={n: i for i, n in enumerate(ids)},
            sampled_token_ids=sampled,
        )

    def _forward(self, name: str, start: int, count: int) -> list[int]:
        (table,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        tokens = self._tokens[name]
        value = self.kv[table[(start - 1) // BLOCK]][(start - 1) % BLOCK] if start else 0
        for at in range(start, start + count):
            # Attention reads the whole prefix: any wrong value in it shows.
            value = value_after(value, tokens[at])
            self.kv[table[at // BLOCK]][at % BLOCK] = value
        if start + count < len(tokens):
            return []
        right = 0
        for at, token in enumerate(tokens):
            right = value_after(right, token)
            if self.kv[table[at // BLOCK]][at % BLOCK] != right:
                value += 1
        tokens.append(value % VOCABULARY)
        return [tokens[-1]]

    def _copy(
        self, direction: str, batch: CopyBatch, source: Any, froms: Any, target: Any, tos: Any
    ) -> None:
        fails = self.fails(direction, batch.ticket)
        for one, other in zip(froms, tos):
            target[other] = [7] * BLOCK if fails else list(source[one])
        if fails:
            self._failed[direction == "store"].append(batch.ticket)

    def _forget_failures(self, plan: Any) -> None:
        for failed, done in zip(self._failed, (plan.loads_done, plan.stores_done)):
            failed[:] = [ticket for ticket in failed if ticket > done]

    def _result(self, plan: Any) -> TransferResult:
        last = self.manager.drained()
        self._done.append((last.loads_done, last.stores_done))
        done = self._done.popleft()
        waited = max(done[0], plan.wait_load if plan else 0)
        return TransferResult(
            *done,
            failed_loads=tuple(t for t in self._failed[0] if t <= waited),
            failed_stores=tuple(t for t in self._failed[1] if t <= done[1]),
        )


def make_scheduler(asynchronous: bool, blocks: int) -> Any:
    """vLLM's scheduler for a small GPU cache."""
    config = _config(asynchronous)
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32)
    kv = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layers.0", "layers.1"], spec)])
    made = AsyncScheduler if asynchronous else Scheduler
    grammars = StructuredOutputManager(config)
    scheduler = made(config, kv, grammars, block_size=BLOCK, log_stats=True)
    assert scheduler.scheduler_config.async_scheduling == asynchronous
    return scheduler


@cache
def _config(asynchronous: bool) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_MODEL))
        wanted = {
            "model": folder, "skip_tokenizer_init": True, "block_size": BLOCK,
            "max_model_len": 2048, "max_num_seqs": 8, "max_num_batched_tokens": 256,
            "async_scheduling": False,
        }  # fmt: skip
        known = inspect.signature(EngineArgs).parameters
        args = EngineArgs(**{k: v for k, v in wanted.items() if k in known})
        config = args.create_engine_config()
    # The CPU platform turns it off whatever is asked for.
    config.scheduler_config.async_scheduling = asynchronous
    return config


@cache
def _hasher() -> Any:
    init_none_hash(sha256)
    return get_request_block_hasher(BLOCK, sha256)


def _hooked(hook: Callable[..., Any], instance: Any, name: str) -> Callable[..., Any]:
    wrapped = getattr(instance, name)
    return lambda *args, **kwargs: hook(wrapped, instance, args, kwargs)
