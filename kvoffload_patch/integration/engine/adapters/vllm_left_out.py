"""Blocks that vLLM finds for a hit and leaves out of it, because a drafting model is at work.

It may have read a token behind the block, so the block is computed again. But vLLM has to find it:
without it, it leaves out the one before, or finds a window too short for any hit.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import islice, takewhile
from typing import Any

from kvoffload_patch.integration.engine.adapters.vllm_groups import leaves_last_out
from kvoffload_patch.integration.engine.adapters.vllm_scheduler import SchedulerView


class LeftOut:
    """Those of one lookup.

    Args:
        view: the scheduler.

    Attributes:
        possible: whether there can be any.
    """

    def __init__(self, view: SchedulerView) -> None:
        coordinator, self._sizes = view.manager.coordinator, view.block_sizes
        self._key = view.key
        self._windows = leaves_last_out(coordinator)  # by group: whether it is a sliding window
        self.possible = bool(self._windows)
        self._hash_size = getattr(view.pool, "hash_block_size", self._sizes[0])
        # Up to 0.19 each of two groups leaves one out, of what the other one has left.
        twice = getattr(coordinator, "use_eagle", False) and len(self._sizes) > 1
        self._most = 2 if twice else 1
        self._got: dict[int, dict[Hashable, Any]] = {}

    def begin(self) -> None:
        """Another lookup begins."""
        self._got = {group: {} for group in self._windows}

    def note(self, group: int, key: Hashable, block: Any) -> None:
        """vLLM has asked for the block of this key, and got one."""
        if group in self._got:
            self._got[group].setdefault(key, block)

    def behind(
        self, groups: Sequence[Sequence[Any]], hashes: Sequence[Hashable]
    ) -> Iterator[tuple[int, Any]]:
        """The blocks behind the hit of each such group, mostly one.

        Args:
            groups: blocks of the hit, by group.
            hashes: of the request's blocks; empty where it does not have them.

        Yields:
            Tokens of the prefix that ends with it, and the block.
        """
        for group, got in self._got.items():
            begin = len(groups[group])
            end, size = begin + self._most, self._sizes[group]
            if hashes and size == self._hash_size:
                keys = [self._key(one, group) for one in islice(hashes, begin, end)]
                found = [got[key] for key in takewhile(got.__contains__, keys)]
            else:  # full attention is asked for from the first block on
                found = [] if self._windows[group] else list(got.values())[begin:end]
            for blocks, block in enumerate(found, begin + 1):
                yield blocks * size, block
