"""What the engine asks a rank by RPC, and closing it again. Runs in the worker.

The functions take a worker and are called through vLLM's `collective_rpc`, each as `answering`
makes it, so that no exception reaches the executor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from kvoffload_patch import __version__, launch_token
from kvoffload_patch.integration.protocol import TIER, RankGeometry, RankOpened, attached
from kvoffload_patch.integration.shared_files import SharedFileAddress
from kvoffload_patch.integration.slot_counts import SlotCounts
from kvoffload_patch.integration.spec_kinds import unknown_layer
from kvoffload_patch.integration.worker.devices import warn_if_never_run, why_refused
from kvoffload_patch.integration.worker.lost import LostTier
from kvoffload_patch.integration.worker.memory import drop_early, early_bytes
from kvoffload_patch.integration.worker.reporting import ranks_of_engine, reports
from kvoffload_patch.integration.worker.same_bytes import same_bytes
from kvoffload_patch.integration.worker.tier import RankTier
from kvoffload_patch.integration.worker.unheard import UnheardRank
from kvoffload_patch.integration.worker.vllm_runner import block_layout, runner_is_patched
from kvoffload_patch.integration.worker.weights import weights_digest
from kvoffload_patch.memory import attainable, shareable
from kvoffload_patch.plan import TransferPlan

# Tiers whose copies did not end: the memory that these may use stays, for as long as the process.
_NOT_FREED: list[RankTier] = []


def answering(function: Callable[..., Any]) -> Callable[..., tuple[bool, Any]]:
    """What to send to the workers: it answers (True, result), or (False, what was raised).

    When a worker raises, vLLM's executor leaves the other workers' answers unread, and takes them
    for those to its next call; a worker that lacks this package is such a case. So what is sent
    is pickled by value, as nested functions are, and imports by name within its own `try`.
    """
    module, name = function.__module__, function.__name__

    def call(worker: Any, *args: Any) -> tuple[bool, Any]:
        import importlib

        try:
            return True, getattr(importlib.import_module(module), name)(worker, *args)
        except Exception as error:  # noqa: BLE001 - told to the engine
            return False, f"{type(error).__name__}: {' '.join(str(error).split())}"

    call.__name__ = name
    return call


def describe_rank(worker: Any) -> RankGeometry:
    """The rank's geometry; allocates nothing."""
    who = {"rank": worker.rank, "host": os.uname().nodename, "pid": os.getpid()}
    who["version"] = __version__
    try:
        from kvoffload_patch.transfer.memory.host_buffer import slot_pitch

        runner = worker.model_runner
        missing = runner_is_patched(runner)
        if missing:
            return RankGeometry(**who, error=missing)
        refused = why_refused(runner.device) or unknown_layer(runner.kv_cache_config)
        if refused:
            return RankGeometry(**who, error=refused)
        layout = block_layout(runner)
        warn_if_never_run(runner.device)
        return RankGeometry(
            **who,
            block_bytes=layout.block_bytes,
            slot_bytes=slot_pitch(layout.block_bytes),
            num_blocks=layout.num_blocks,
            device=layout.device.type,
            available_bytes=attainable().nbytes,
            shareable_bytes=shareable().nbytes,
            early_bytes=early_bytes(runner),
            same_bytes=same_bytes(worker, layout),
            of_ranks=ranks_of_engine(worker),
        )
    except Exception as error:  # noqa: BLE001 - told to the engine, which refuses
        from kvoffload_patch.transfer.errors import one_line

        return RankGeometry(**who, error=one_line(error))


def can_share(
    worker: Any, board: SharedFileAddress, slots: Sequence[SharedFileAddress] = ()
) -> tuple[bool, bool]:
    """Whether this rank reaches the engine's board, and those of the common slots that are its."""
    own = [address for address in slots if worker.rank in address.ranks]
    return board.is_reachable(), all(address.is_reachable() for address in own)


def open_rank(
    worker: Any,
    num_slots: int,
    backend: str = "auto",
    integrity: str = "off",
    board: SharedFileAddress | None = None,
    slots: Sequence[SharedFileAddress] = (),
    by_layer: bool = False,
    end: Callable[[], object] | None = None,
) -> RankOpened:
    """Allocate the slots, prove one block's round trip, and take part from the next step on.

    With ``slots`` in common, on some ranks or all, no rank is asked what it alone has done.
    ``end`` ends the process of the rank; None: that is not to be ended, whatever comes.
    """
    who = {"rank": worker.rank, "pid": os.getpid()}
    try:
        shared = SlotCounts(board, worker.rank) if board is not None else None
        made = RankTier if reports(worker) else UnheardRank
        tier = made(
            worker.model_runner, num_slots, backend=backend, alone=ranks_of_engine(worker) == 1,
            board=shared, integrity=integrity, common=slots, rank=worker.rank,
            by_layer=by_layer, end=end,
        )  # fmt: skip
        setattr(worker.model_runner, TIER, tier)
        # On a host that has workers only, no engine will say so.
        launch_token.confirm(launch_token.ATTACHED)
        return RankOpened(
            **who,
            num_ready=tier.num_ready,
            growing=tier.growing,
            load_ms_per_block=tier.load_ms_per_block,
            copies=tier.copies,
            overlap=tier.overlap,
            compares=tier.compares,
        )
    except Exception as error:  # noqa: BLE001 - told to the engine, which refuses
        from kvoffload_patch.transfer.errors import one_line

        return RankOpened(**who, error=one_line(error))


def resize_rank(worker: Any, num_slots: int, sizing: int) -> tuple[int, bool]:
    """Use so many slots; answers how many are usable now, and whether they become more."""
    tier: RankTier = getattr(worker.model_runner, TIER)
    with tier.order.between_steps():
        return tier.resize(num_slots, sizing)


def wipe_rank(worker: Any) -> None:
    """Overwrite every slot, once every copy planned so far is done."""
    tier: RankTier = getattr(worker.model_runner, TIER)
    with tier.order.between_steps():
        tier.wipe()


def drain_rank(worker: Any) -> bool:
    """Return when every copy planned so far is done: whether none failed, as `RankTier.drain`."""
    tier: RankTier | None = getattr(worker.model_runner, TIER, None)
    if tier is None:
        return False
    with tier.order.between_steps():
        return tier.drain()


def finish_rank(worker: Any, plan: TransferPlan | None) -> None:
    """Carry out the loads that no step will bring, finish every copy and take no more part.

    Raises:
        RuntimeError: a load that is promised has failed, a copy is past its deadline, or there is
            no tier to carry it out. No step begins any more then, if the engine goes on.
    """
    tier = getattr(worker.model_runner, TIER, None)
    if tier is None:
        if plan is not None:
            raise RuntimeError(
                "expected this rank's tier to be open, found none; restart the server"
            )
        return
    try:
        with tier.order.between_steps():
            try:
                tier.finish(plan)
            finally:
                close_rank(worker)
    except BaseException as error:
        if attached(worker.model_runner) is tier:  # a step on another thread may still use it
            _keep(tier)
        setattr(worker.model_runner, TIER, LostTier(error, tier.ends))
        raise


def digest_weights(worker: Any) -> str:
    """As `weights_digest`; empty where it cannot be made, because no memory is left for it."""
    try:
        return weights_digest(worker.model_runner.get_model())
    except Exception:  # noqa: BLE001 - unknown, so these count as other weights
        return ""


def end_process() -> None:
    """End this process at once: a thread of it is blocked, so it cannot end in order."""
    os._exit(1)


def close_rank(worker: Any) -> None:
    """Finish the copies under way, give the memory back and take no more part."""
    drop_early(worker.model_runner)
    tier = getattr(worker.model_runner, TIER, None)
    if tier is not None:
        delattr(worker.model_runner, TIER)
        try:
            tier.close()
        except BaseException:
            _keep(tier)
            raise


def _keep(tier: RankTier) -> None:
    _NOT_FREED.append(tier)
