"""The most that any cache could find: Belady's optimum for a GPU and a tier taken together.

It knows the whole trace. Between two requests it keeps as many blocks as both have room for, those
whose next use comes first. It stores and loads in no time, never needs room for a request that
runs, and does not mind a block whose prefix is gone: no policy finds more. An answer's blocks are
there as soon as its request is admitted.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from scripts.simulate.trace import Request


def most_hits(trace: Sequence[Request], room: int, block_tokens: int) -> tuple[int, int]:
    """Blocks found at best, and those that a cache without end would find.

    Args:
        trace: requests in the order of their lookups.
        room: blocks of GPU and tier together.
        block_tokens: tokens of a block.
    """
    following = _next_uses(trace, block_tokens)
    kept: dict[int, int] = {}  # key -> the request that uses it next
    furthest: list[tuple[int, int]] = []  # (minus that request, key), the last of them first
    seen: set[int] = set()
    found = reusable = 0
    for request, uses in zip(trace, following):
        wanted = request.keys[: request.reusable(block_tokens)]
        reusable += len(seen.intersection(wanted))
        found += len(kept.keys() & set(wanted))
        seen.update(request.keys)
        for key, use in zip(request.keys, uses):
            if use:
                kept[key] = use
                heapq.heappush(furthest, (-use, key))
            else:
                kept.pop(key, None)
        while len(kept) > room:
            use, key = heapq.heappop(furthest)
            if kept.get(key) == -use:
                del kept[key]
    return found, reusable


def _next_uses(trace: Sequence[Request], block_tokens: int) -> list[list[int]]:
    """For each key of each request, the request that looks it up next; 0 for none."""
    later: dict[int, int] = {}
    uses = []
    for number in range(len(trace) - 1, -1, -1):
        keys = trace[number].keys
        uses.append([later.get(key, 0) for key in keys])
        looked_up = trace[number].reusable(block_tokens)
        later.update(dict.fromkeys(keys[:looked_up], number))
        for key in keys[looked_up:]:
            later.pop(key, None)  # it comes to be there again
    return uses[::-1]
