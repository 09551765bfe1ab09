"""Preemptions with a tier beside plain vLLM: the same random loads, on vLLM's own scheduler.

Usage: python tests/scheduler_half/preemptions.py FIRST COUNT [RELEASE SOURCES]
       python tests/scheduler_half/preemptions.py FIRST COUNT block

Plays the loads of so many seeds, on the installed vLLM or on a release out of the folder that has
its `vllm/`, and prints one JSON object: preemptions of both over all loads, how many of the tier's
were while its loads held GPU blocks, and the loads in which it has more. `costs` has both sides'
steps, tokens computed, and steps that requests have waited for their first token.

With `block` the other side is plain vLLM, too, with a GPU block more: what a small change of the
order of admissions does by itself.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[:0] = [str(_TESTS.parent), str(_TESTS)]

REQUESTS = 50
# Steps between two requests are multiplied by this: a queue builds up, or hardly.
PACES = (1, 3)


class Counted:
    """Plays a load, and counts.

    Attributes:
        preempted: how often requests were preempted.
        beside_loads: how often while a load held GPU blocks.
        costs: steps, tokens computed, and steps that requests have waited for their first token.
    """

    def __init__(self, seed: int, pace: int, tier: bool, more_blocks: int = 0) -> None:
        from integration.engine.mini import FakeRanks, Mini

        rng = random.Random(seed)
        about: dict[str, Any] = {
            "ranks": FakeRanks(rng.choice([0.1, 1.0, 15.0])),
            "late": rng.randrange(4),
            "load_mode": rng.choice(["auto", "auto", "parked"]),
            "blocks": rng.choice([30, 41, 60]) + more_blocks,
        }
        asked = list(_asked(rng, seed))
        self._mini = mini = Mini(tier=tier, **about)
        self._step, mini.begin_step = mini.begin_step, self._begin_step  # type: ignore[method-assign]
        self.preempted = self.beside_loads = 0
        self.costs = Counter(steps=0, tokens=0, waited=0)
        for prompt, count, steps in asked:
            mini.add(prompt, count)
            for _ in range(pace * steps):
                if mini.queue or mini.scheduler.has_requests():
                    mini.step()
        mini.run()
        mini.check()
        assert self.preempted == mini.device.resumed

    def _begin_step(self) -> Any:
        mini = self._mini
        before = list(mini.scheduler.running)
        scheduled = self._step()
        preempted = sum(request.status.name == "PREEMPTED" for request in before)
        self.preempted += preempted
        waited = sum(not tokens for tokens in mini.answers.values())
        computed = sum(scheduled.num_scheduled_tokens.values())
        self.costs.update(steps=1, tokens=computed, waited=waited)
        if mini.tier is not None and mini.tier._loads.arriving:
            self.beside_loads += preempted
        return scheduled


def _asked(rng: random.Random, seed: int) -> Iterator[tuple[list[int], int, int]]:
    """Prompts that come again, and answers that outgrow a small GPU.

    Yields:
        A prompt, the tokens wanted, and steps until the next one.
    """
    from scheduler_half.scenarios import prompt

    known = [prompt(rng.randrange(1, 9), seed=100 * seed + n) for n in range(8)]
    for _ in range(REQUESTS):
        own = prompt(0, rng.randrange(10**6), tail=rng.randrange(1, 40))
        yield rng.choice(known) + own, rng.choice([4, 20, 60]), rng.choice([0, 0, 1, 3, 8])


def compare(seeds: Iterable[int], block: bool = False) -> dict[str, Any]:
    """Preemptions without and with a tier over all loads, and the loads in which it has more.

    Args:
        seeds: of the loads.
        block: with a GPU block more, in place of the tier.
    """
    plain = ours = beside = loads = 0
    more: list[str] = []
    costs = Counter[str](), Counter[str]()
    name = "a block more" if block else "tier"
    for seed in seeds:
        for pace in PACES:
            one = Counted(seed, pace, tier=False)
            other = Counted(seed, pace, tier=not block, more_blocks=int(block))
            plain, ours, loads = plain + one.preempted, ours + other.preempted, loads + 1
            beside += other.beside_loads
            for cost, played in zip(costs, (one, other)):
                cost.update(played.costs)
            if other.preempted > one.preempted:
                counts = f"{other.preempted} instead of {one.preempted}"
                more.append(f"seed {seed}, pace {pace}: {counts}")
    found = {"loads": loads, "plain": plain, name: ours, "beside loads": beside}
    return {**found, "costs": {"plain": costs[0], name: costs[1]}, "more": more}


def main(first: str, count: str, release: str = "", folder: str = "") -> None:
    """Compare, and print."""
    block = release == "block"
    if release and not block:
        from scheduler_half import half

        half.use_release(release, Path(folder).resolve())
    seeds = range(int(first), int(first) + int(count))
    print(json.dumps(compare(seeds, block), indent=1))
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
    # What vLLM has imported may keep threads of its own.
    os._exit(0)
