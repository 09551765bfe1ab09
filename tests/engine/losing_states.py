"""Loads that bring every block but those of layers that keep a state, which are zeros instead."""

from __future__ import annotations

from typing import Any

from kvoffload_patch.transfer.backends.torch import TorchBackend


def install(core: Any) -> None:
    """Make loads of this process lose states; ``core`` is vLLM's engine core.

    What a load within the step brings has its key before it is copied, and a key names its group.
    """
    from vllm.v1.core.kv_cache_utils import get_group_id
    from vllm.v1.kv_cache_interface import MambaSpec

    pool = core.scheduler.kv_cache_manager.block_pool
    groups = core.scheduler.kv_cache_config.kv_cache_groups
    states = {i for i, one in enumerate(groups) if isinstance(one.kv_cache_spec, MambaSpec)}
    as_made = TorchBackend.load

    def load(self: TorchBackend, gpu_block_ids: Any, cpu_slots: Any, *args: Any, **kw: Any) -> Any:
        found = yield from as_made(self, gpu_block_ids, cpu_slots, *args, **kw)
        keys = {block: pool.blocks[block].block_hash for block in map(int, gpu_block_ids)}
        lost = [block for block, key in keys.items() if get_group_id(key) in states]
        for row in self._rows:
            row[lost] = 0
        return found

    TorchBackend.load = load  # type: ignore[method-assign]
