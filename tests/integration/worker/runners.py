"""A model runner with KV tensors of its own on the CPU, for tests of what a rank does with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def small_runner(**parallel: int) -> Any:
    """Seven blocks of KV in one layer, each of other numbers.

    Args:
        parallel: the sizes in vLLM's configuration; one rank without any.
    """
    return SimpleNamespace(
        kv_caches=[torch.arange(105.0).reshape(7, 3, 5)],
        kv_cache_config=SimpleNamespace(num_blocks=7, kv_cache_tensors=[], kv_cache_groups=[]),
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(**parallel)),
        device=torch.device("cpu"),
    )


def keep_slots(runner: Any, slots: Any, engines: int = 2) -> None:
    """Have it keep the slots of the last step's tokens, as runner V1 does up to 0.19."""
    runner._get_slot_mappings = None
    runner.vllm_config.parallel_config.data_parallel_size = engines
    table = SimpleNamespace(slot_mapping=SimpleNamespace(gpu=slots))
    runner.input_batch = SimpleNamespace(block_table=SimpleNamespace(block_tables=[table]))
