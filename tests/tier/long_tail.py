"""What it costs that a policy gives up a head with a long tail: python FILE BLOCKS.

The tail leaves first, and is found by walking from the head, once: those that leave next are known.
"""

from __future__ import annotations

import sys
import time

from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.policies.lru import LRUPolicy


def head_first(blocks: int) -> OffloadManager:
    """A tier full of one prefix, all of which was used since but its head."""
    tier = OffloadManager(blocks, LRUPolicy)
    store(tier, *range(blocks))
    tier.request_ended(range(blocks))
    tier.touch(range(1, blocks))
    return tier


def store(tier: OffloadManager, *keys: int) -> None:
    """A step that computes these, and whose copies are done by its end."""
    tier.make_plan(lambda block, key: True, {key: abs(key) for key in keys})
    tier.apply(tier.drained())


if __name__ == "__main__":
    tier = head_first(int(sys.argv[1]))
    for new in (-1, -2, -3):
        begin = time.thread_time()
        store(tier, new)
        print(f"a step that stores one block: {1e3 * (time.thread_time() - begin):.2f} ms")
