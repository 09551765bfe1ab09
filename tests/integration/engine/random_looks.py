"""What random runs look at besides: stores that wait, and searches that vLLM is given."""

from __future__ import annotations

from itertools import chain
from typing import Any

from kvoffload_patch.integration.engine.adapters.vllm_groups import leaves_last_out


def let_stores_wait(mini: Any, seed: int) -> list[int]:
    """In half of the runs, also where few blocks are free, so that what waits is overwritten.

    Returns:
        How many blocks waited, after each step that left any.
    """
    if seed // 8 % 2:
        mini.tier.choice._blocks_ahead = -1
    manager, waited = mini.manager, list[int]()
    make_plan = manager.make_plan

    def planned(*args: Any) -> Any:
        plan = make_plan(*args)
        if manager._waiting:
            waited.append(len(manager._waiting))
        return plan

    manager.make_plan = planned
    return waited


def compare(mini: Any) -> list[int]:
    """Compare each result of a search that vLLM is given with what it would find at that moment.

    Returns:
        The number of blocks of each.
    """
    coordinator, prefix = mini.kv_manager.coordinator, mini.view.prefix
    find, blocks = coordinator.find_longest_cache_hit, list[int]()
    in_order = mini.view.in_order and not leaves_last_out(coordinator)  # it may find less then

    def compared(block_hashes: Any, max_cache_hit_length: int) -> Any:
        given = prefix.given.get(id(block_hashes))
        result = find(block_hashes, max_cache_hit_length)
        if given is not None and result is given.result:
            hits = [[block for block in hit if not block.is_null] for hit in result[0]]
            for block in chain(*hits):
                assert block.ref_cnt and block.block_hash is not None, "it could be handed out"
            if in_order:
                (own,) = prefix._search(block_hashes, max_cache_hit_length)[0]
                # More may have been cached since by another request of the same step.
                keys = [block.block_hash for block in own][: len(hits[0])]
                assert keys == [block.block_hash for block in hits[0]]
            blocks.append(sum(map(len, hits)))
        return result

    coordinator.find_longest_cache_hit = compared
    return blocks
