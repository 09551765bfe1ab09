"""Preemptions with a tier beside plain vLLM: the same random loads, on vLLM's own scheduler.

Usage: python tests/scheduler_half/preemptions.py FIRST COUNT [RELEASE SOURCES]

Plays the loads of so many seeds, on the installed vLLM or on a release out of the folder that has
its `vllm/`, and prints one JSON object: preemptions of both over all loads, how many of the tier's
were while its loads held GPU blocks, and the loads in which it has more.
"""

from __future__ import annotations

import json
import os
import random
import sys
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
    """

    def __init__(self, seed: int, pace: int, tier: bool) -> None:
        from integration.engine.mini import FakeRanks, Mini

        rng = random.Random(seed)
        about: dict[str, Any] = {
            "ranks": FakeRanks(rng.choice([0.1, 1.0, 15.0])),
            "late": rng.randrange(4),
            "load_mode": rng.choice(["auto", "auto", "parked"]),
            "blocks": rng.choice([30, 41, 60]),
        }
        asked = list(_asked(rng, seed))
        self._mini = mini = Mini(tier=tier, **about)
        self._step, mini.begin_step = mini.begin_step, self._begin_step  # type: ignore[method-assign]
        self.preempted = self.beside_loads = 0
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


def compare(seeds: Iterable[int]) -> dict[str, Any]:
    """Preemptions without and with a tier over all loads, and the loads in which it has more."""
    plain = ours = beside = loads = 0
    more: list[str] = []
    for seed in seeds:
        for pace in PACES:
            one, other = (Counted(seed, pace, tier) for tier in (False, True))
            plain, ours, loads = plain + one.preempted, ours + other.preempted, loads + 1
            beside += other.beside_loads
            if other.preempted > one.preempted:
                counts = f"{other.preempted} instead of {one.preempted}"
                more.append(f"seed {seed}, pace {pace}: {counts}")
    return {"loads": loads, "plain": plain, "tier": ours, "beside loads": beside, "more": more}


def main(first: str, count: str, release: str = "", folder: str = "") -> None:
    """Compare, and print."""
    if release:
        from scheduler_half import half

        half.use_release(release, Path(folder).resolve())
    print(json.dumps(compare(range(int(first), int(first) + int(count))), indent=1))
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
    # What vLLM has imported may keep threads of its own.
    os._exit(0)
