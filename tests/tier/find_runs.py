"""What it costs to find 512 keys whose slots are runs of neighbours: python FILE BLOCKS,BLOCKS.

In a tier of 600,000 slots, whose tables are in no cache, with other values of `NEIGHBOUR_BLOCKS`.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time

from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.policies.lru import LRUPolicy
from scripts.bench.varied import varied

SLOTS, ASKED, ROUNDS = 600_000, 512, 40
RUNS = (512, 64, 32, 16, 8, 4, 1)


def asked(keys: list[bytes], run: int) -> list[bytes]:
    """Keys in runs of so many, as objects that nobody has hashed."""
    begins = [random.randrange(len(keys) - run) for _ in range(ASKED // run)]
    return [bytes(bytearray(key)) for begin in begins for key in keys[begin : begin + run]]


if __name__ == "__main__":
    random.seed(0)
    keys = [os.urandom(32) for _ in range(SLOTS)]
    tier = OffloadManager(SLOTS, LRUPolicy)
    tier.make_plan(lambda block, key: True, dict(zip(keys, range(SLOTS))))
    tier.apply(tier.drained())
    for run in RUNS:
        took: dict[int, list[float]] = {int(value): [] for value in sys.argv[1].split(",")}
        for _ in range(ROUNDS):
            for value, times in took.items():
                these = asked(keys, run)
                with varied("NEIGHBOUR_BLOCKS", value):
                    begin = time.perf_counter()
                    tier._find_pieces(these)
                    times.append(1e6 * (time.perf_counter() - begin))
        told = ", ".join(f"{value}: {statistics.median(took[value]):.0f}" for value in took)
        print(f"in runs of {run}, µs by value: {told}")
