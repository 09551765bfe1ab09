"""What a block costs the engine's thread in tiers of ten thousand to a million slots.

The tier's own manager with each policy, full: a new prompt is stored, which evicts as many blocks,
and one of the prompts that it has is loaded, in turn. Microseconds of CPU time for each block
stored and evicted, and for each loaded; medians over prompts. Writes docs/measured/scale.json, and
`page` makes the table of docs/policies.md from that.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvoffload_patch.config import EVICTIONS
from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.policies import POLICIES
from scripts import ROOT
from scripts.bench.common import machine, say, table, write_json

RESULTS = ROOT / "docs" / "measured" / "scale.json"
SLOTS = (10_000, 100_000, 1_000_000)
PROMPT_BLOCKS, KEY_BYTES, PROMPTS = 100, 32, 1000
Keys = tuple[bytes, ...]


class Prompts:
    """Prompts of random keys, stored in a tier and loaded from it; GPU blocks are made up."""

    def __init__(self, policy: str, slots: int) -> None:
        self.tier = OffloadManager(slots, POLICIES[policy])
        self._random = random.Random(0)
        self._stored: deque[Keys] = deque(maxlen=slots // PROMPT_BLOCKS)
        self._block_ids = range(PROMPT_BLOCKS)

    def new(self) -> Keys:
        """Keys of a prompt that nobody has asked before."""
        return tuple([self._random.randbytes(KEY_BYTES) for _ in self._block_ids])

    def store(self, keys: Keys) -> float:
        """Store a prompt; returns seconds of CPU time."""
        computed = dict(zip(keys, self._block_ids))
        seconds = _timed(lambda: self._step(computed, keys))
        self._stored.append(keys)
        return seconds

    def load(self) -> float:
        """Load one of the prompts that were stored last; returns seconds of CPU time."""
        keys = self._random.choice(self._stored)
        while not all(map(self.tier.holds, keys)):
            keys = self._random.choice(self._stored)

        def loaded() -> None:
            self.tier.begin_load(keys, self._block_ids)
            self._step({}, keys)

        return _timed(loaded)

    def _step(self, computed: dict[bytes, int], ended: Keys) -> None:
        """A step, whose copies are done by its end, and with it a request."""
        if computed:
            self.tier.note_new_blocks(self._block_ids)
        self.tier.make_plan(_is_there, computed)
        self.tier.apply(self.tier.drained())
        self.tier.request_ended(ended)


def _is_there(block: int, key: object) -> bool:
    return True


def _timed(do: Callable[[], None]) -> float:
    begin = time.thread_time()
    do()
    return time.thread_time() - begin


def played(policy: str, slots: int, prompts: int = PROMPTS) -> dict[str, Any]:
    """Microseconds a block with one policy, in a tier of so many slots that is full."""
    asked = Prompts(policy, slots)
    for _ in range(slots // PROMPT_BLOCKS):
        asked.store(asked.new())
    new = [asked.new() for _ in range(prompts)]
    stored, loaded = zip(*[(asked.store(keys), asked.load()) for keys in new])
    return {
        "policy": policy, "slots": slots,
        "stored_us": _a_block(stored), "loaded_us": _a_block(loaded),
    }  # fmt: skip


def _a_block(seconds: Sequence[float]) -> float:
    return round(1e6 * statistics.median(seconds) / PROMPT_BLOCKS, 3)


def page(document: dict[str, Any]) -> str:
    """The table: a line for each policy, a column for each size."""
    sizes = sorted({row["slots"] for row in document["rows"]})
    lines = [["µs a block: stored and evicted; loaded", *(f"{size:,} slots" for size in sizes)]]
    for policy in dict.fromkeys(row["policy"] for row in document["rows"]):
        of = {row["slots"]: row for row in document["rows"] if row["policy"] == policy}
        found = (of[size] for size in sizes)
        lines.append([policy, *(f"{r['stored_us']:.2f}; {r['loaded_us']:.2f}" for r in found)])
    about = document["machine"]
    said = f"Commit {about['commit']}, {about['date'][:10]}, {about['cpu']}: `{about['command']}`."
    return f"{table(lines)}\n\n{said}"


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--slots", nargs="+", type=int, default=SLOTS, help="sizes of the tier")
    options = parser.parse_args()
    document: dict[str, Any] = {"machine": machine(), "rows": []}
    for slots in options.slots:
        for policy in EVICTIONS:
            print(f"{policy}, {slots:,} slots", file=sys.stderr, flush=True)
            document["rows"].append(played(policy, slots))
    write_json(options.out, document)
    say(page(document))
    return 0
