"""The schedulers that `step` compares: vLLM's own, with nothing, with the tier, with a connector.

A model and its workers are stood in for: each request that computes its last token is given one
more, and every copy that a step has planned is done when that step's output comes back.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count, repeat
from pathlib import Path
from typing import Any, ClassVar

BLOCK = 16
CPU_SLOTS = 100_000
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32",
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 32_000,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16_384,
}  # fmt: skip
_LAYERS = ["layers.0", "layers.1"]
_PAGE = 2 * BLOCK * 2 * 16 * 4  # bytes of a block in a layer: K and V, tokens, heads, floats


class Sim:
    """A plain scheduler, and what stands for its model.

    Args:
        slots: requests that may run.
        blocks: GPU blocks.
    """

    connector = ""
    connector_options: dict[str, Any] = {}
    asynchronous = False  # whether a step may be scheduled while the one before it runs

    def __init__(self, slots: int, blocks: int = 20_000) -> None:
        self.scheduler, self._hasher = _scheduler(
            slots, blocks, self._transfers(), self.asynchronous
        )
        self.loads_end = True
        self.stored = self.loaded = self.found = 0  # blocks so far; found anywhere by requests
        self._ids = count()

    def add(self, seed: int, tokens: int, max_tokens: int) -> None:
        """A request whose prompt is its own from the first block on, one for each seed."""
        prompt = [seed % 32_000, seed // 32_000, *repeat(7, tokens - 2)]
        self.ask(f"request-{next(self._ids)}", prompt, max_tokens)

    def ask(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        """A request with any prompt."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(request_id, prompt, sampling, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)

    def step(self) -> float:
        """One step; microseconds of CPU time in `schedule` and `update_from_output`."""
        began = time.thread_time_ns()
        scheduled = self.scheduler.schedule()
        between = time.thread_time_ns()
        self.found += sum(r.num_computed_tokens for r in scheduled.scheduled_new_reqs) // BLOCK
        output = self._run(scheduled)
        self._answer(scheduled, output)
        resumed = time.thread_time_ns()
        self.scheduler.update_from_output(scheduled, output)
        return (time.thread_time_ns() - resumed + between - began) / 1000

    def run_until(self, running: int) -> None:
        """Step until this many requests run and none of them is in its prompt."""
        for _ in range(1000):
            self.step()
            now = self.scheduler.running
            if len(now) == running and all(r.num_output_tokens for r in now):
                return
        raise RuntimeError(f"expected {running} running requests, found {len(now)}")

    def _run(self, scheduled: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        ids = list(scheduled.num_scheduled_tokens)
        requests = self.scheduler.requests
        tokens: list[list[int]] = [
            [11] if requests[i].num_computed_tokens >= requests[i].num_tokens else [] for i in ids
        ]
        return ModelRunnerOutput(ids, {i: n for n, i in enumerate(ids)}, tokens)

    def _transfers(self) -> Any:
        """The connector as vLLM's configuration; None without one."""
        from vllm.config import KVTransferConfig

        if not self.connector:
            return None
        options = {"cpu_bytes_to_use": CPU_SLOTS * _PAGE * len(_LAYERS), **self.connector_options}
        return KVTransferConfig(
            kv_connector=self.connector, kv_role="kv_both", kv_connector_extra_config=options
        )

    def _answer(self, scheduled: Any, output: Any) -> None:
        """Put on a step's output what the workers would say of its copies."""


class Ranks:
    """Stands for the workers of a `SchedulerTier`."""

    load_ms_per_block = 0.02
    copies_overlap, compares = True, False
    sharing = 1
    overlap = 0.0

    def step_failure(self) -> str:
        """No copy is made."""
        return ""


class TierSim(Sim):
    """With the CPU tier, attached to this scheduler.

    Attributes:
        settings: other than what the process is told.
        ranks: the workers.
        now: the tier's clock, in seconds.
    """

    settings: ClassVar[dict[str, str]] = {}
    computes_take_time = False  # where none is taken, every load looks slower than computing
    ranks: Any = Ranks()
    now: Callable[[], float] = time.monotonic

    def __init__(self, slots: int, blocks: int = 20_000) -> None:
        super().__init__(slots, blocks)
        self._done = [0, 0]
        from kvoffload_patch.config import Settings
        from kvoffload_patch.integration.engine.attach import connect
        from kvoffload_patch.integration.install import step_hooks
        from kvoffload_patch.tier.manager import OffloadManager
        from kvoffload_patch.tier.policies import policy_named

        # As the process is told, so that policies can be compared.
        settings = replace(Settings.from_env(), log_interval=1e9)
        if not self.computes_take_time:
            settings = replace(settings, recompute="never")
        settings = replace(settings, **self.settings)  # type: ignore[arg-type]
        hooks = step_hooks(self.scheduler)
        self.manager = OffloadManager(
            CPU_SLOTS, policy_named(settings.eviction), store=settings.store,
            min_uses=settings.store_min_uses, gpu_blocks=blocks,
        )  # fmt: skip
        self.breaker = connect(self.scheduler, hooks, self.manager, self.ranks, settings, self.now)
        if not self.asynchronous:
            self.breaker.steps_under_way = int  # as an engine with one step at a time
        self.hooks = hooks

    def _answer(self, scheduled: Any, output: Any) -> None:
        from kvoffload_patch.integration.protocol import PLAN, RESULT
        from kvoffload_patch.links import LOAD, STORE
        from kvoffload_patch.plan import TransferResult

        plan = getattr(scheduled, PLAN, None)
        if plan is not None and plan.before and self.loads_end:
            self._done[0] = plan.before[-1].ticket
            self.loaded += sum(len(load.target_ids) for load in plan.before)
        if plan is not None and plan.after:
            self._done[1] = plan.after[-1].ticket
            self.stored += len(plan.after[-1].source_ids)
        setattr(output, RESULT, TransferResult(((LOAD, self._done[0]), (STORE, self._done[1]))))


class HooksSim(TierSim):
    """With the tier's hooks, which find it detached: each calls on at once."""

    def __init__(self, slots: int, blocks: int = 20_000) -> None:
        super().__init__(slots, blocks)
        self.breaker.detached = True
        self.hooks.live.clear()


class EagerSim(TierSim):
    """With the CPU tier, and `KVOFFLOAD_STORE=eager`."""

    settings: ClassVar = {"store": "eager"}


class LruSim(TierSim):
    """With the CPU tier, and `KVOFFLOAD_EVICTION=lru`."""

    settings: ClassVar = {"eviction": "lru"}


class ArcSim(TierSim):
    """With the CPU tier, and `KVOFFLOAD_EVICTION=arc`."""

    settings: ClassVar = {"eviction": "arc"}


class S3FifoSim(TierSim):
    """With the CPU tier, and `KVOFFLOAD_EVICTION=s3fifo`."""

    settings: ClassVar = {"eviction": "s3fifo"}


class WholeSim(TierSim):
    """With the CPU tier, and `KVOFFLOAD_GPU_PREFIXES=whole`."""

    settings: ClassVar = {"gpu_prefixes": "whole"}


class SimpleSim(Sim):
    """With vLLM's SimpleCPUOffloadConnector, which VLLM_USE_SIMPLE_KV_OFFLOAD=1 chooses."""

    connector = "SimpleCPUOffloadConnector"

    def _answer(self, scheduled: Any, output: Any) -> None:
        from vllm.v1.outputs import KVConnectorOutput
        from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

        meta = scheduled.kv_connector_metadata
        self.stored += len(meta.store_gpu_blocks)
        self.loaded += len(meta.load_gpu_blocks)
        arrived = set(meta.load_event_to_reqs.get(meta.load_event, ()))
        stores = {meta.store_event: 1} if meta.store_event >= 0 else {}
        output.kv_connector_output = KVConnectorOutput(
            finished_recving=arrived or None,
            kv_connector_worker_meta=SimpleCPUOffloadWorkerMetadata(stores) if stores else None,
        )


class OffloadingSim(Sim):
    """With vLLM's OffloadingConnector, its choice for ``--kv-offloading-size``.

    By default it stores no blocks of answers; here it does, as the others do.
    """

    connector = "OffloadingConnector"
    connector_options = {"offload_prompt_only": False}

    def _answer(self, scheduled: Any, output: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
            OffloadingWorkerMetadata,
        )
        from vllm.v1.outputs import KVConnectorOutput

        meta = scheduled.kv_connector_metadata
        self.stored += sum(len(job.src_spec.block_ids) for job in meta.store_jobs.values())
        self.loaded += sum(len(job.dst_spec.block_ids) for job in meta.load_jobs.values())
        done = dict.fromkeys([*meta.store_jobs, *meta.load_jobs], 1)
        arrived = {job.req_id for job in meta.load_jobs.values()}
        output.kv_connector_output = KVConnectorOutput(
            finished_sending=set(),
            finished_recving=arrived,
            kv_connector_worker_meta=OffloadingWorkerMetadata(done) if done else None,
        )


SIDES: dict[str, type[Sim]] = {
    "plain": Sim,
    "hooks": HooksSim,
    "tier": TierSim,
    "eager": EagerSim,
    "lru": LruSim,
    "arc": ArcSim,
    "s3fifo": S3FifoSim,
    "whole": WholeSim,
    "simple": SimpleSim,
    "offloading": OffloadingSim,
}


def _scheduler(slots: int, blocks: int, transfers: Any, asynchronous: bool) -> tuple[Any, Any]:
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        config = EngineArgs(
            model=folder, skip_tokenizer_init=True, block_size=BLOCK, max_model_len=16_384,
            max_num_seqs=slots, max_num_batched_tokens=8192, async_scheduling=asynchronous,
            kv_transfer_config=transfers,
        ).create_engine_config()  # fmt: skip
    config.cache_config.num_gpu_blocks = blocks
    init_none_hash(sha256)
    tensors = _tensors(blocks) if transfers else []
    kv = KVCacheConfig(blocks, tensors, [KVCacheGroupSpec(_LAYERS, spec)])
    grammars = StructuredOutputManager(config)
    kind = AsyncScheduler if asynchronous else Scheduler
    scheduler = kind(config, kv, grammars, block_size=BLOCK, log_stats=True)
    return scheduler, get_request_block_hasher(BLOCK, sha256)


def _tensors(blocks: int) -> list[Any]:
    """Where the layers' KV would lie; a connector takes the bytes of a block from it."""
    from vllm.v1.kv_cache_interface import KVCacheTensor

    layer = _PAGE * blocks
    return [KVCacheTensor(layer * len(_LAYERS), list(_LAYERS), layer, _PAGE)]
