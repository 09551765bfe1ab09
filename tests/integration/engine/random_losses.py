"""Random requests that preempt each other: what the GPU loses, and whether the tier has it.

Usage: python tests/integration/engine/random_losses.py FIRST COUNT [RELEASE SOURCES]

Plays so many seeds. The tier has room for everything and no copy fails, so it has each full block
that was computed, or that a connector has filled: at once if it is eager, and else before it is
among those that the next step may be given. A block that the GPU has lost without that, because one
in use was handed out right when it was given back, counts as overwritten.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(_TESTS.parent), str(_TESTS)]

_REQUESTS, _LONGEST = 25, 300  # tokens of a prompt and its answer
_WHOLE = ("wipe", "grows")  # of `random_runs.describe`: not of these runs


class Losses:
    """Watches a `Mini` whose tier has room for everything, and whose copies do not fail.

    Attributes:
        found: blocks by what is wrong with them.
        seen: how often what could be wrong has happened.
    """

    def __init__(self, mini: Any) -> None:
        self._mini = mini
        self._step, mini.begin_step = mini.begin_step, self._begin_step
        choice = mini.tier.choice
        self._left_out, choice._not_computed = choice._not_computed, self._not_computed
        self._held, self._forgotten = dict[int, Any](), set[Any]()
        self.found, self.seen = Counter[str](), Counter[str]()

    def reset(self) -> None:
        """The tier is empty, and the prefix cache unless somebody held blocks."""
        self._held, self._forgotten = {}, {*self._cached().values()}

    def over(self) -> None:
        """The run is over. Of what two blocks held the loss of the first counts."""
        counted, seen = self._mini.manager.stats.overwritten, self.seen
        self.found["lost and not counted"] = max(0, seen["lost"] - counted)
        self.found["counted and not lost"] = max(0, counted - seen["gone"])

    def _cached(self) -> dict[int, Any]:
        blocks = self._mini.pool.blocks
        return {one.block_id: one.block_hash for one in blocks if one.block_hash is not None}

    def _not_computed(self, request: Any, blocks: Any) -> None:
        self.seen["not computed"] += len(blocks)
        self._left_out(request, blocks)

    def _begin_step(self) -> Any:
        before = {*self._held.items(), *self._cached().items()}
        scheduled = self._step()
        self._held, has = self._cached(), self._mini.manager._slot_of.keys()
        gone = {key for _, key in before.difference(self._held.items())}
        lost = gone - set(self._held.values()) - has - self._forgotten
        self._forgotten.intersection_update(self._held.values())
        self.seen.update({"gone": len(gone), "lost": len(lost)})
        self._look(has)
        return scheduled

    def _look(self, has: Any) -> None:
        manager, view = self._mini.manager, self._mini.view
        if manager.lazy:
            blocks = view.free_after(None, self._mini.tier._front._step_blocks)
            next_ones = {self._held.get(block.block_id) for block in blocks} - {None}
            missing = next_ones - has - self._forgotten
            self.found["handed out next and not stored"] += len(missing)
        else:
            waits = {*manager._waiting.values(), *manager._queue._keys.values()}
            missing = {*self._held.values()} - has - waits - self._forgotten
            self.found["computed and not stored"] += len(missing)


def describe(seed: int, most_in_flight: int = 6, policies: tuple[str, ...] = ()) -> dict[str, Any]:
    """What the engine of a seed is like, as arguments of `Mini`; mostly with priorities.

    Args:
        seed: of the run.
        most_in_flight, policies: as `random_runs.limits_of` has them; without any, all.
    """
    from integration.engine import random_runs
    from integration.engine.random_shapes import (
        CHECKPOINTS,
        CHUNKS,
        STATE,
        keeps_the_end,
        retention,
    )

    from kvoffload_patch.config import STORES

    rng = random.Random(f"losses {seed}")
    shape = rng.choice([None, STATE, CHECKPOINTS, CHUNKS]) if seed % 2 else None
    if keeps_the_end():  # an earlier release, which may lack some of them
        # Beside a connector 0.26 itself answers wrongly, where it preempts with steps under way.
        shape, most_in_flight = None, 1 if seed % 4 == 1 else most_in_flight
    drawn = random_runs.describe(seed, most_in_flight, shape)
    about = {name: value for name, value in drawn.items() if name not in _WHOLE}
    crowded = seed % 2 == 0
    if shape is None:
        about["windows"] = windows = (None, 40) if seed % 4 == 3 else (None,)
        about["retention"] = retention(seed, windows, shape)
    several = "priority" in (policies or random_runs.POLICIES)
    return {
        **about,
        "num_slots": 3000, "store": rng.choice((*STORES, "lazy")), "step_ms": rng.choice([0, 3]),
        "policy": "priority" if several and rng.random() < 0.9 else "fcfs",
        "blocks": rng.choice([21, 22, 25, 30] if crowded else [49, 60]),
        "limits": {
            "long_prefill_token_threshold": rng.choice([20, 48] if crowded else [0, 48, 100]),
            "scheduler_reserve_full_isl": rng.random() < 0.2,
        },
    }  # fmt: skip


def run(seed: int, *limits: Any) -> Counter[str]:
    """One random run; what has happened in it.

    Args:
        seed: of the run.
        limits: as `random_runs.limits_of` has them.

    Raises:
        AssertionError: the tier lacks a block, a token is wrong, or a request does not end.
    """
    from integration.engine import random_runs, random_shapes
    from integration.engine.mini import FakeRanks, Mini
    from scheduler_half.scenarios import nothing_held

    rng, about = random.Random(f"lost {seed}"), describe(seed, *(limits or random_runs.limits_of()))
    mini = Mini(ranks=FakeRanks(rng.choice([0.1, 1.0, 15.0])), weighs=False, **about)
    mini.scheduler.adaptive_long_prefill_threshold = False
    losses, connector = Losses(mini), None
    if seed % 4 == 1 and len(about["windows"]) == 1:
        connector = random_shapes.connector(mini, seed)
    if connector is not None:
        connector._may_fail = False
    _play(mini, rng, losses, connector, seed % 2 == 0)
    random_runs._end(mini, connector)
    losses.over()
    mini.check()
    nothing_held(mini)
    assert not +losses.found, dict(+losses.found)
    loaded, brought = mini.manager.stats.loaded, connector.loads if connector is not None else 0
    happened = {"loaded": loaded, "resumed": mini.device.resumed, "brought": brought}
    return losses.seen + Counter({**happened, about["store"]: 1})


def _play(mini: Any, rng: random.Random, losses: Losses, connector: Any, crowded: bool) -> None:
    """Many requests, each with a priority; or fewer long ones, computed in parts together."""
    from integration.engine.trainer import reset
    from scheduler_half.scenarios import prompt

    counts = rng.choice([[1, 2, 5, 20], [10, 30, 60]])
    own_blocks, steps = ((6, 10, 14), (1, 1, 2)) if crowded else ((0, 1, 3, 8), (0, 1, 2, 5, 20))
    known = [prompt(rng.randrange(1, 9), rng.randrange(10**6), tail=7) for _ in range(4)]
    for _ in range(_REQUESTS):
        beginning, count = rng.choice(known)[: rng.choice([0, 16, 40, 340])], rng.choice(counts)
        own = prompt(rng.choice(own_blocks), rng.randrange(10**6), rng.choice([0, 1, 9]))
        asked = (beginning + own)[: _LONGEST - count] or [5]
        name = mini.add(asked, count, rng.randrange(6))
        if connector is not None:
            connector.show(asked)
        for _ in range(rng.choice(steps)):
            if mini.queue or mini.scheduler.has_requests():
                mini.step()
        if rng.random() < 0.4 and name not in mini.scheduler.requests:
            known.append(asked + mini.answers[name])
        if rng.random() < 0.03 and not mini.queue:
            if reset(mini):
                mini.device.scramble()
            losses.reset()


if __name__ == "__main__":
    from integration.engine.seeds import play

    os._exit(play(run, describe, *sys.argv[1:]))
