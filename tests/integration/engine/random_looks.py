"""What random runs look at besides: stores that wait, and searches that vLLM is given."""

from __future__ import annotations

from typing import Any


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

    def compared(block_hashes: Any, max_cache_hit_length: int) -> Any:
        given = prefix.given.get(id(block_hashes))
        result = find(block_hashes, max_cache_hit_length)
        if given is not None and result is given.result:
            (hit,), (own,) = result[0], prefix._search(block_hashes, max_cache_hit_length)[0]
            keys = [block.block_hash for block in hit]
            # More may have been cached since by another request of the same step.
            assert keys == [block.block_hash for block in own][: len(keys)] and None not in keys
            assert all(block.ref_cnt for block in hit), "it could be handed out"
            blocks.append(len(hit))
        return result

    coordinator.find_longest_cache_hit = compared
    return blocks
