"""CPU memory of one rank: taken from the system while the model loads, made slots afterwards.

Touching tens of GiB takes seconds. How many a rank will need is known before its model is: its
share of KVOFFLOAD_CPU_GIB, about so much where that is auto. So that much is mapped and touched
beside the loading, and laid out as slots once the size of a block is known. The copy kernel is
compiled beside it, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvoffload_patch.config import GIB, Settings
from kvoffload_patch.integration.protocol import attached, engine_bytes, num_engines
from kvoffload_patch.integration.shared_files import SharedFileAddress
from kvoffload_patch.integration.worker.devices import why_refused
from kvoffload_patch.integration.worker.tuning import RANK_STEP_BYTES
from kvoffload_patch.memory import (
    attainable,
    auto_bytes,
    available,
    locked_memory_limit_bytes,
    raise_locked_memory_limit,
    shareable,
)
from kvoffload_patch.threads import JoinedThread

logger = logging.getLogger("vllm.kvoffload_patch")


EARLY = "_kvoffload_early"  # on the model runner, until a tier takes it or is refused


def begin_early(runner: Any) -> JoinedThread | None:
    """Map this rank's share and start touching it; never raises, and waits for nothing.

    What fails here is found again, and said, when the tier is opened.

    Returns:
        The compiling of the kernels, if any, to be joined when the model is loaded, because
        nothing may be launched beside a CUDA graph that is captured.
    """
    try:
        nbytes = 0 if hasattr(runner, EARLY) or attached(runner) else _share_bytes(runner)
        if nbytes and nbytes <= attainable().nbytes:
            setattr(runner, EARLY, _begin(runner, nbytes))
            args = (runner.device, Settings.from_env().integrity)
            compiling = JoinedThread(_compile_kernels, "kvoffload-compile", None, args)
            compiling.start()
            return compiling
    except Exception as error:  # noqa: BLE001 - loading the model must not depend on it
        logger.debug("kvoffload_patch: no CPU memory taken in advance: %s", error)
    return None


def early_bytes(runner: Any) -> int:
    """Bytes that `begin_early` has taken so far: in use, but not by others."""
    mapping = getattr(runner, EARLY, None)
    return 0 if mapping is None else int(mapping.toucher.touched)


def drop_early(runner: Any) -> None:
    """No tier will take it: give it back."""
    mapping = _take_early(runner)
    if mapping is not None:
        mapping.close()


def open_host(
    runner: Any, num_slots: int, layout: Any, shared: SharedFileAddress | None = None
) -> Any:
    """The rank's `HostBuffer`, over the memory taken early if there is any.

    Args:
        shared: where this rank has its slots in common with others; None if it has its own.

    Raises:
        TransferError: not even its first piece can be had.
        OSError: the common slots cannot be opened.
    """
    from kvoffload_patch.transfer.device import device_of
    from kvoffload_patch.transfer.memory.host_buffer import HostBuffer

    can_take = _available_to_one(runner.vllm_config)
    if not device_of(layout.device).is_host:
        raise_locked_memory_limit()
        limit = locked_memory_limit_bytes()
        if limit < num_slots * layout.block_bytes:
            logger.info(
                "kvoffload_patch: ulimit -l is %d kB, less than the %.1f GiB to be registered; "
                "drivers that count these against it will end the tier's growth there",
                limit >> 10, num_slots * layout.block_bytes / GIB,
            )  # fmt: skip
    if shared is None:
        mapping = _take_early(runner)
    else:
        drop_early(runner)
        mapping = _map_shared(shared, num_slots, layout, can_take)
    return HostBuffer(
        num_slots, layout.block_bytes, layout.device, available_bytes=can_take, mapping=mapping
    )


def _map_shared(
    shared: SharedFileAddress, num_slots: int, layout: Any, can_take: Callable[[], int]
) -> Any:
    from kvoffload_patch.transfer.device import device_of
    from kvoffload_patch.transfer.memory.host_buffer import slot_pitch
    from kvoffload_patch.transfer.memory.mapping import HostMapping, touch_threads
    from kvoffload_patch.transfer.memory.numa import node_of

    nbytes = num_slots * slot_pitch(layout.block_bytes)
    node = None if device_of(layout.device).is_host else node_of(layout.device)
    return HostMapping(nbytes, node, can_take, shared.open(), touch_threads(len(shared.ranks)))


def _compile_kernels(device: Any, integrity: str) -> None:
    try:
        from kvoffload_patch.transfer.device import device_of

        on = device_of(device)
        if "staged" not in on.backends:
            return  # it has no use for kernels
        from kvoffload_patch.transfer.backends.tiles import warm_up
        from kvoffload_patch.transfer.integrity import OFF

        on.use()
        warm_up(device, integrity != OFF)
        on.synchronize()
    except Exception as error:  # noqa: BLE001 - found again when a copy backend is opened
        logger.debug("kvoffload_patch: no kernel compiled in advance: %s", error)


def _share_bytes(runner: Any) -> int:
    config = runner.vllm_config
    if runner.device.type == "cpu" or not config.cache_config.enable_prefix_caching:
        return 0
    if why_refused(runner.device):
        return 0
    if _shares_memory(runner.device):
        return 0  # vLLM measures it as the GPU's while the model loads
    if getattr(config.model_config, "use_mla", False) and _num_ranks(config) > 1:
        return 0  # ranks hold the same bytes, and will map their slots together
    nbytes = engine_bytes(config, Settings.from_env())
    if nbytes is None:  # an estimate: what there is when the tier is opened decides
        nbytes = auto_bytes(shareable().nbytes) // num_engines(config)
    return nbytes // _num_ranks(config)


def _num_ranks(vllm_config: Any) -> int:
    return max(1, int(getattr(vllm_config.parallel_config, "world_size", 1)))


def _available_to_one(vllm_config: Any) -> Callable[[], int]:
    """What one rank may take, now, even if every other one takes its next step at that moment."""
    others = (_num_ranks(vllm_config) - 1) * RANK_STEP_BYTES
    return lambda: available().nbytes - others


def _shares_memory(device: Any) -> bool:
    from kvoffload_patch.transfer.device import device_of

    return device_of(device).shares_memory()


def _begin(runner: Any, nbytes: int) -> Any:
    from kvoffload_patch.transfer.memory.mapping import HostMapping, touch_threads
    from kvoffload_patch.transfer.memory.numa import node_of

    # Ranks need not be alike. Address space costs nothing, and a new mapping costs the touching.
    can_take = _available_to_one(runner.vllm_config)
    nbytes_mapped, threads = nbytes + nbytes // 8, touch_threads(_num_ranks(runner.vllm_config))
    mapping = HostMapping(nbytes_mapped, node_of(runner.device), can_take, threads=threads)
    mapping.toucher.start(nbytes)
    return mapping


def _take_early(runner: Any) -> Any:
    mapping = getattr(runner, EARLY, None)
    if mapping is not None:
        delattr(runner, EARLY)
    return mapping
