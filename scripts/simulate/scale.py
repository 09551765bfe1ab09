"""What a block costs the engine's thread in tiers of ten thousand to a million slots.

The tier's own manager with each policy, full: a new prompt is stored, which evicts as many blocks,
and one of the prompts that it has is loaded, in turn. Microseconds of CPU time for each block
stored and evicted, and for each loaded; medians over prompts. Then the commands that look at each
slot: another policy, half as many slots, and forgetting every key. Writes docs/measured/scale.json,
and `page` makes the tables of docs/policies.md from that.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kvoffload_patch.config import EVICTIONS
from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.policies import POLICIES
from scripts import ROOT
from scripts.bench import arguments
from scripts.bench.common import machine, say, table, write_json

RESULTS = ROOT / "docs" / "measured" / "scale.json"
SLOTS = (10_000, 100_000, 1_000_000)
PROMPT_BLOCKS, KEY_BYTES, PROMPTS = 100, 32, 1000
Keys = tuple[bytes, ...]
# What is done to a full tier, as the rows and the table name it.
COMMANDS = {"set_us": "set --eviction", "resize_us": "resize to half", "empty_us": "empty"}


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

    def fill(self) -> None:
        """Store as many prompts as there is room for."""
        for _ in range(self.tier.num_slots // PROMPT_BLOCKS):
            self.store(self.new())

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
    asked.fill()
    new = [asked.new() for _ in range(prompts)]
    stored, loaded = zip(*[(asked.store(keys), asked.load()) for keys in new])
    return {
        "policy": policy, "slots": slots,
        "stored_us": _a_block(stored), "loaded_us": _a_block(loaded), **commanded(policy, slots),
    }  # fmt: skip


def commanded(policy: str, slots: int) -> dict[str, float]:
    """Microseconds a slot that each of `COMMANDS` takes, in a tier of so many that is full."""
    asked, to_empty = Prompts(policy, slots), Prompts(policy, slots)
    asked.fill()
    to_empty.fill()
    other = POLICIES["arc" if policy == "lru" else "lru"]
    took = {
        "set_us": _timed(lambda: asked.tier.change_policy(other)),
        "resize_us": _timed(lambda: asked.tier.resize(slots // 2)),
        "empty_us": _timed(lambda: to_empty.tier.clear("emptied")),
    }
    return {name: round(1e6 * seconds / slots, 3) for name, seconds in took.items()}


def _a_block(seconds: Sequence[float]) -> float:
    return round(1e6 * statistics.median(seconds) / PROMPT_BLOCKS, 3)


def page(document: dict[str, Any]) -> str:
    """The tables: a line for each policy, a column for each size."""
    rows, about = document["rows"], document["machine"]
    blocks = _by_size("µs a block: stored and evicted; loaded", rows, ("stored_us", "loaded_us"))
    commands = _by_size(f"µs a slot: {'; '.join(COMMANDS.values())}", rows, tuple(COMMANDS))
    said = f"Commit {about['commit']}, {about['date'][:10]}, {about['cpu']}: `{about['command']}`."
    return f"{blocks}\n\n{commands}\n\n{said}"


def _by_size(title: str, rows: Sequence[dict[str, Any]], figures: Sequence[str]) -> str:
    sizes = sorted({row["slots"] for row in rows})
    lines = [[title, *(f"{size:,} slots" for size in sizes)]]
    for policy in dict.fromkeys(row["policy"] for row in rows):
        of = {row["slots"]: row for row in rows if row["policy"] == policy}
        cells = ("; ".join(f"{of[size][name]:.2f}" for name in figures) for size in sizes)
        lines.append([policy, *cells])
    return table(lines)


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=arguments.target, default=RESULTS)
    size = arguments.whole(PROMPT_BLOCKS)
    parser.add_argument("--slots", nargs="+", type=size, default=SLOTS, help="sizes of the tier")
    options = parser.parse_args()
    document: dict[str, Any] = {"machine": machine(), "rows": []}
    for slots in options.slots:
        for policy in EVICTIONS:
            print(f"{policy}, {slots:,} slots", file=sys.stderr, flush=True)
            document["rows"].append(played(policy, slots))
    write_json(options.out, document)
    say(page(document))
    return 0
