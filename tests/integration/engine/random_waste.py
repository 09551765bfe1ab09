"""Random requests over vLLM's scheduler: what the tier moves, loses or counts without need.

Usage: python tests/integration/engine/random_waste.py FIRST COUNT [STORE]

Plays so many seeds, the tier of which holds everything, and prints what was wasted, and in which.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(_TESTS.parent), str(_TESTS)]

_REQUESTS, _LONGEST = 30, 340  # tokens of a prompt and its answer
_WHOLE = ("wipe", "grows")  # of `describe`: not of these runs


class Waste:
    """Watches a `Mini` whose tier has room for everything.

    Attributes:
        found: blocks, or tokens, by what is wrong with them.
        seen: how often what could be wrong has happened.
    """

    def __init__(self, mini: Any) -> None:
        self._mini, self._on_gpu = mini, mini.view.gpu_lookup()
        self._step, mini.begin_step = mini.begin_step, self._begin_step
        manager, hits = mini.manager, mini.view.prefix_stats
        self._load, manager.begin_load = manager.begin_load, self._begin_load
        self._plan, manager._plan_store = manager._plan_store, self._plan_store
        self._count, hits.count = hits.count, self._counted
        self._counts: dict[str, tuple[int, int, int]] = {}
        self.found, self.seen = Counter[str](), Counter[str]()

    def _plan_store(self, *args: Any) -> Any:
        manager = self._mini.manager
        before = set(manager._slot_of)
        stores = self._plan(*args)
        planned = [key for _, keys, _ in list(manager._stores.under_way)[-1:] for key in keys]
        if stores:
            self.seen["stored"] += len(planned)
            self.found["stored though the tier has it"] += len(before.intersection(planned))
        return stores

    def _begin_load(self, keys: Sequence[Hashable], blocks: Sequence[int], *args: Any) -> Any:
        """The last block of a prompt is loaded to its own place, wherever else it is."""
        own, found = self._mini.view.still_cached, self._on_gpu
        there = [key for key, b in zip(keys, blocks) if found(key) is not None and not own(b, key)]
        arriving = self._mini.tier._loads.arriving
        self.found["loaded though the GPU has it"] += len(there)
        self.found["loaded though it arrives"] += sum(key in arriving for key in keys)
        self.seen["loaded"] += len(keys)
        return self._load(keys, blocks, *args)

    def _counted(self, request: Any, queried: int, hit: int) -> Any:
        counted = self._count(request, queried, hit)
        if not request.num_preemptions and counted[0]:
            self._counts[request.request_id] = (int(request.num_tokens), *counted)
        return counted

    def _begin_step(self) -> Any:
        """What waits could hit before the step is hit by what the step admits."""
        tier, view = self._mini.tier, self._mini.view
        waiting = [one for one in view.waiting() if view.needs_lookup(one)]
        could = {one.request_id: tier._admission._pool.look_up(one, 1 << 30) for one in waiting}
        tokens = {name: result.tokens for name, result in could.items()}
        self._counts.clear()
        scheduled = self._step()
        for new in scheduled.scheduled_new_reqs:
            name, hit = new.req_id, new.num_computed_tokens
            self.seen["admitted"] += 1
            self.seen["hit"] += hit
            self.found["hit before the step alone"] += max(0, tokens.get(name, 0) - hit)
            if name in self._counts:
                length, queried, by_tier = self._counts[name]
                whole = hit == length - 1  # the last block is loaded, and is no hit
                wrong = length - queried + by_tier not in (hit, hit - 15 * whole)
                self.found["counted otherwise"] += wrong
        return scheduled


def run(seed: int, store: str = "eager") -> Waste:
    """One random run.

    Raises:
        AssertionError: a wrong token, or a request that does not come to an end.
    """
    from integration.engine.mini import FakeRanks, Mini
    from integration.engine.random_runs import describe
    from scheduler_half.scenarios import prompt

    rng = random.Random(f"waste {seed}")
    about = {name: value for name, value in describe(seed).items() if name not in _WHOLE}
    ranks = FakeRanks(rng.choice([0.1, 1.0, 15.0]))
    mini = Mini(ranks=ranks, weighs=False, **{**about, "num_slots": 4000, "store": store})
    waste, counts = Waste(mini), rng.choice([[1, 2, 5, 20], [10, 30, 60]])
    known = [prompt(rng.randrange(1, 7), rng.randrange(10**6), tail=7) for _ in range(5)]
    for _ in range(_REQUESTS):
        beginning, count = rng.choice(known), rng.choice(counts)
        own = prompt(rng.choice([0, 0, 1, 3]), rng.randrange(10**6), rng.choice([0, 1, 9]))
        asked = beginning[: rng.choice([16, 40, 340])] + own
        name = mini.add(asked[: _LONGEST - count], count, rng.randrange(3))
        for _ in range(rng.choice([0, 0, 1, 2, 5, 30])):
            if mini.queue or mini.scheduler.has_requests():
                mini.step()
        if rng.random() < 0.5 and name not in mini.scheduler.requests:
            known.append(asked + mini.answers[name])
    mini.run()
    mini.check()
    while mini.queue or mini.scheduler.has_requests():
        mini.step()
    mini.settle()
    stats = mini.manager.stats
    waste.found["stores otherwise counted"] += abs(stats.stored - waste.seen["stored"])
    waste.found["loads otherwise counted"] += abs(stats.loaded - waste.seen["loaded"])
    waste.found["not held though stored"] += abs(stats.stored - mini.manager.num_used)
    return waste


def main(first: str, count: str, store: str = "eager") -> int:
    """Play so many seeds, and say what was wasted."""
    found, seen = Counter[str](), Counter[str]()
    for seed in range(int(first), int(first) + int(count)):
        waste = run(seed, store)
        found.update(waste.found)
        seen.update(waste.seen)
        if +waste.found:
            print(f"seed {seed}: {dict(+waste.found)}")
    print(f"of {dict(seen)}: {dict(+found) or 'nothing'}")
    sys.stdout.flush()
    return int(bool(+found))


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))
