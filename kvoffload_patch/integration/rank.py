"""One rank's side of the tier: what the engine asks by RPC, and what each step carries out.

Runs in the worker. The functions that take a worker are called through vLLM's `collective_rpc`;
they answer with plain data, errors included, so that the engine can say which rank has failed.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from kvoffload_patch.integration.adapters import TIER
from kvoffload_patch.integration.runner import copy_output, kv_tensors, runner_is_patched
from kvoffload_patch.memory import available_memory_bytes
from kvoffload_patch.tier.plan import TransferPlan, TransferResult

_TIMED_BYTES = 64 << 20


@dataclass(frozen=True)
class RankGeometry:
    """What a rank says of itself before a tier is opened. ``error``: why it cannot take part."""

    rank: int
    host: str
    pid: int
    block_bytes: int = 0
    num_blocks: int = 0
    device: str = ""
    available_bytes: int = 0
    error: str = ""


@dataclass(frozen=True)
class RankOpened:
    """What a rank says when its tier is open: how long a block takes to load, in ms."""

    rank: int
    pid: int
    load_ms_per_block: float = 0.0
    error: str = ""


def describe_rank(worker: Any) -> RankGeometry:
    """The rank's geometry; allocates nothing."""
    who = {"rank": worker.rank, "host": os.uname().nodename, "pid": os.getpid()}
    try:
        runner = worker.model_runner
        missing = runner_is_patched(runner)
        if missing:
            return RankGeometry(**who, error=missing)
        layout = _layout(runner)
        return RankGeometry(
            **who,
            block_bytes=layout.block_bytes,
            num_blocks=layout.num_blocks,
            device=layout.device.type,
            available_bytes=available_memory_bytes(),
        )
    except Exception as error:  # noqa: BLE001 - told to the engine, which refuses
        return RankGeometry(**who, error=_one_line(error))


def open_rank(worker: Any, num_slots: int, canary_fault_rank: int = -1) -> RankOpened:
    """Allocate the slots, prove one block's round trip, and take part from the next step on."""
    who = {"rank": worker.rank, "pid": os.getpid()}
    try:
        tier = RankTier(worker.model_runner, num_slots, fault=worker.rank == canary_fault_rank)
        setattr(worker.model_runner, TIER, tier)
        return RankOpened(**who, load_ms_per_block=tier.load_ms_per_block)
    except Exception as error:  # noqa: BLE001 - told to the engine, which refuses
        return RankOpened(**who, error=_one_line(error))


def drain_rank(worker: Any) -> None:
    """Return when every copy planned so far is done."""
    tier = getattr(worker.model_runner, TIER, None)
    if tier is not None:
        tier.drain()


def close_rank(worker: Any) -> None:
    """Finish the copies under way, give the memory back and take no more part."""
    tier = getattr(worker.model_runner, TIER, None)
    if tier is not None:
        delattr(worker.model_runner, TIER)
        tier.close()


class RankTier:
    """Carries out plans for one model runner.

    Args:
        runner: vLLM's model runner, its KV cache initialised.
        num_slots: CPU slots to allocate.
        fault: make the canary fail.

    Raises:
        TransferError: the layout, the memory or the canary.
    """

    def __init__(self, runner: Any, num_slots: int, fault: bool = False) -> None:
        from kvoffload_patch.transfer.canary import run_canary
        from kvoffload_patch.transfer.copy_engine import CopyEngine
        from kvoffload_patch.transfer.copy_torch import TorchBackend
        from kvoffload_patch.transfer.host_buffer import HostBuffer

        self._runner = runner
        layout = _layout(runner)
        self._tensor = kv_tensors(runner)[0][0]
        self._pointer = self._tensor.data_ptr()
        self._host = HostBuffer(num_slots, layout.block_bytes, layout.device)
        try:
            backend = TorchBackend(layout, self._host.slots)
            run_canary(layout, backend, slot=num_slots - 1, fault=fault)
            self.load_ms_per_block = _time_loads(layout, backend, num_slots)
            self._engine = CopyEngine(layout, backend)
        except BaseException:
            self._host.close()
            raise

    def begin_step(self, plan: TransferPlan | None) -> None:
        """Before the forward pass."""
        if plan is not None and self._moved():
            raise RuntimeError(
                "kvoffload_patch: the KV tensors of this rank were replaced after the CPU tier "
                "was attached, so it cannot go on; restart the server, or set "
                "KVOFFLOAD_DISABLE=1 to serve without it."
            )
        self._engine.begin_step(plan)

    def end_step(self, output: Any) -> Any:
        """After the forward pass and what follows it: submit the store, report what is done."""
        self._engine.end_step()
        return copy_output(output, TransferResult(*self._engine.poll()))

    def drain(self) -> None:
        """Return when every copy is done."""
        self._engine.drain()

    def close(self) -> None:
        """Drain and free."""
        self._engine.drain()
        del self._engine
        self._host.close()

    def _moved(self) -> bool:
        tensors, _ = kv_tensors(self._runner)
        return not tensors or tensors[0].data_ptr() != self._pointer


def _layout(runner: Any) -> Any:
    from kvoffload_patch.transfer.layout import BlockLayout

    tensors, block_dim = kv_tensors(runner)
    return BlockLayout(tensors, runner.kv_cache_config.num_blocks, block_dim)


def _time_loads(layout: Any, backend: Any, num_slots: int) -> float:
    """Milliseconds that a block takes to load; stores the same blocks first, so none changes."""
    count: int = min(num_slots, layout.num_blocks, max(1, _TIMED_BYTES // layout.block_bytes))
    ids = list(range(count))
    backend.store(ids, ids)
    backend.load(ids, ids)  # the first time pays for page faults and for warming up
    _wait(layout.device)
    begin = time.perf_counter()
    backend.load(ids, ids)
    _wait(layout.device)
    return (time.perf_counter() - begin) * 1000 / count


def _wait(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _one_line(error: Exception) -> str:
    return " ".join(f"{error}".split()) or type(error).__name__
