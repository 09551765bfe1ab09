"""What an output of `Scheduler.schedule` says of block tables, release by release."""

from __future__ import annotations

from typing import Any


def tables_of(block_ids: Any) -> list[list[int]]:
    """A block table for each group, from whatever a release says."""
    if not block_ids:
        return []
    return [list(block_ids)] if isinstance(block_ids[0], int) else [list(ids) for ids in block_ids]


def running_of(requests: Any) -> list[tuple[str, bool, Any, int]]:
    """Running requests, as (name, whether resumed, new blocks, tokens computed)."""
    if isinstance(requests, list):  # up to 0.9.1
        return [
            (one.req_id, one.resumed_from_preemption, one.new_block_ids, one.num_computed_tokens)
            for one in requests
        ]
    resumed = getattr(requests, "resumed_req_ids", None)
    if resumed is None:  # up to 0.11.0
        resumed = {n for n, yes in zip(requests.req_ids, requests.resumed_from_preemption) if yes}
    return [
        (name, name in resumed, blocks, start)
        for name, blocks, start in zip(
            requests.req_ids, requests.new_block_ids, requests.num_computed_tokens
        )
    ]
