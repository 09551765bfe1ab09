"""Random runs with several ranks of which one dies, answers no more, or has a copy that hangs.

Usage: python tests/integration/engine/random_hung.py FIRST COUNT [RELEASE SOURCES]

What `random_ranks.py` plays without copies that fail, by a modelled clock: at some moment, in a
step or in a call of the ranks, something of one of them comes to a stop, for a while or for good.
Nothing may be waited for longer than docs/failures.md says; an engine that ends says why, and no
token is wrong until then; what goes on in time ends nothing.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

_TESTS = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(_TESTS.parent), str(_TESTS)]

_CALLS = ("describe_rank", "can_share", "open_rank", "drain_rank", "resize_rank", "wipe_rank")
_FOR_GOOD_S = 1e9


def describe(seed: int) -> dict[str, Any]:
    """What comes to a stop: what, when, and for how long."""
    rng = random.Random(f"hung {seed}")
    what = rng.choice(["device", "device", "driver", "queue", "dead", "mute"])
    copies = what not in ("dead", "mute")
    how_long = [5.0, 50.0, 75.0, 85.0, *[_FOR_GOOD_S] * 3]
    return {
        "what": what, "step_s": rng.choice([0.01, 0.3, 2.0, 20.0]),
        "at_step": rng.randrange(10, 150), "seconds": rng.choice(how_long),
        # In a call instead, where a rank is gone.
        "call": None if copies else rng.choice([None, *_CALLS]),
    }  # fmt: skip


class Stop:
    """Makes one thing of one rank come to a stop, when its time has come.

    Args:
        seed: of the run.
        about: as `describe` has it.
        ranks: one of these.
        clock: of all.
    """

    def __init__(self, seed: int, about: dict[str, Any], ranks: Any, clock: Any) -> None:
        self._rng, self._about = random.Random(f"stop {seed}"), about
        self._ranks, self._clock = ranks, clock
        self._steps, self._queue = 0, None
        self.gone_at: float | None = None

    def step(self) -> None:
        """A step is about to begin."""
        self._clock.advance(self._about["step_s"])
        self._steps += 1
        if self._steps != self._about["at_step"] or self._about["call"]:
            return
        if self._about["what"] in ("dead", "mute"):
            self._go()
            return
        rank = self._rng.choice(self._ranks)
        if rank.queues:
            self._queue = self._rng.choice(rank.queues)
            self._queue.next = self._about["what"], self._about["seconds"]

    def called(self, name: str) -> None:
        """A call of the ranks is about to be sent."""
        if name == self._about["call"] and self.gone_at is None:
            self._go()

    def _go(self) -> None:
        self._rng.choice(self._ranks).gone = self._about["what"]
        self.gone_at = self._clock.now

    @property
    def since(self) -> float | None:
        """When it has come to a stop; None: it has not."""
        return self._queue.since if self._queue is not None else self.gone_at


def run(seed: int, *limits: Any) -> Counter[str]:
    """One random run; what has happened in it.

    Args:
        seed: of the run.
        limits: as `random_runs.limits_of` has them.

    Raises:
        AssertionError: something is wrong, takes too long, or has ended for no reason.
    """
    from integration.engine.hung_ranks import Clock, HungQueue, HungRank

    from kvoffload_patch.transfer import engine as copy_engine

    clock = Clock()
    with (
        mock.patch.object(copy_engine, "time", clock),
        mock.patch.object(HungQueue, "clock", clock, create=True),
        mock.patch.object(HungRank, "clock", clock, create=True),
    ):
        return _run(seed, clock, *limits)


def _run(seed: int, clock: Any, *limits: Any) -> Counter[str]:
    from integration.engine import random_ranks, random_runs, several_ranks
    from integration.engine.hung_ranks import HungRank
    from integration.engine.random_users import Users

    from kvoffload_patch.integration.errors import TierRefused

    rng, about = random.Random(f"hung run {seed}"), describe(seed)
    shape, rates, _ = random_ranks.describe(seed)
    most, policies = limits or random_runs.limits_of()
    drawn = random_runs.describe(seed, most, policies=policies)
    kept = {k: v for k, v in drawn.items() if k not in random_ranks._OURS}
    if shape.integrity == "full":
        kept["load_mode"] = "parked"
    users, num_slots, stops = Users(seed), rng.choice([30, 100, 400]), list[Stop]()
    calls = list[Any]()
    executor = _stopping(seed, about, clock, stops, calls)
    none, like = dict.fromkeys(rates, 0.0), (kept["blocks"], kept["windows"])
    try:
        with (
            mock.patch.object(several_ranks, "Executor", executor),
            several_ranks.opened(shape, num_slots, *like, rng, none, None, HungRank) as opened,
        ):
            mini = several_ranks.RanksMini(
                *opened, rng, num_slots=num_slots, weighs=False, wipe=seed % 2 == 0,
                integrity=shape.integrity, **users.settings(kept, False),
            )  # fmt: skip
            seen = _played(mini, rng, users, stops[0], clock, about)
            _closes(opened[1], opened[0], clock)
    except TierRefused as refused:
        assert stops[0].gone_at is not None, refused
        assert "expected every worker to answer" in f"{refused}"
        seen = Counter({"refused": 1})
    assert len(calls[0].waited_s) <= 1, "a rank that has not answered was asked again"
    if seen["refused"]:
        assert clock.now - (stops[0].gone_at or 0.0) == sum(calls[0].waited_s.values())
    return seen + Counter({"runs": 1, f"{about['what']}": stops[0].since is not None})


def _stopping(
    seed: int, about: dict[str, Any], clock: Any, stops: list[Stop], calls: list[Any]
) -> Any:
    """What makes the executor of a run, and says who stops something of it."""
    from integration.engine.hung_ranks import Calls
    from integration.engine.several_ranks import Executor

    def made(ranks: Any, *more: Any) -> Any:
        one = Executor(ranks, *more)
        stops.append(Stop(seed, about, ranks, clock))
        calls.append(Calls(one, clock))
        calls[0].before = stops[0].called
        return one

    return made


def _played(
    mini: Any, rng: random.Random, users: Any, stop: Stop, clock: Any, about: dict[str, Any]
) -> Counter[str]:
    from integration.engine import random_runs
    from integration.engine.hung_ranks import QUEUE, EngineDead
    from integration.engine.several_ranks import Died

    from kvoffload_patch.integration.errors import PromiseBroken

    commands, begin_step = random.Random(rng.random()), mini.begin_step

    def begin() -> Any:
        stop.step()
        return begin_step()

    mini.begin_step = begin
    try:
        random_runs._play(mini, rng, users, commands, None, None)
        random_runs._end(mini, None)
    except (Died, EngineDead, PromiseBroken, RuntimeError) as error:
        assert stop.since is not None, f"ended for no reason: {error!r}"
        assert mini.only_right_tokens()
        if isinstance(error, EngineDead):
            assert stop.gone_at is not None
            return Counter({"vLLM ends": 1})
        assert type(error) is Died or "CPU tier" in f"{error}" or "kvoffload" in f"{error}", error
        if stop.gone_at is None:
            assert about["seconds"] > _deadline_s(), "it would have gone on in time"
            assert clock.now - stop.since <= _most_s(mini, about), "that took too long"
        return Counter({"ended": 1, f"ended by {type(error).__name__}": 1})
    users.check(mini)
    mini.check()
    late = stop.since is not None and clock.now - stop.since > _deadline_s()
    assert late or not mini.breaker.detached, mini.breaker.failure
    if late and about["what"] != QUEUE and about["seconds"] == _FOR_GOOD_S:
        assert clock.now - stop.since <= _most_s(mini, about), "nobody has noticed"
    return Counter({"went on": 1, "detached": mini.breaker.detached})


def _deadline_s() -> float:
    from kvoffload_patch.transfer.tuning import DEADLINE_S

    return DEADLINE_S


def _most_s(mini: Any, about: dict[str, Any]) -> float:
    """From when a copy hangs until the engine has ended: the steps under way are over by then."""
    from kvoffload_patch.transfer.tuning import DEADLINE_PERIOD_S, DEADLINE_S, GRACE_S

    steps_s = (mini.in_flight + 2) * about["step_s"]
    return DEADLINE_S + GRACE_S + 3 * DEADLINE_PERIOD_S + float(steps_s)


def _closes(group: Any, executor: Any, clock: Any) -> None:
    """At shutdown, whatever has stopped."""
    from integration.engine.several_ranks import Died

    from kvoffload_patch.integration.engine.tuning import RPC_TIMEOUT_S
    from kvoffload_patch.integration.errors import TierRefused
    from kvoffload_patch.transfer.tuning import DEADLINE_PERIOD_S, DEADLINE_S, GRACE_S

    gone, began = any(rank.gone for rank in executor.ranks), clock.now
    silent, most_s = group.silent, DEADLINE_S + GRACE_S + 3 * DEADLINE_PERIOD_S
    with suppress(TierRefused, Died):
        group.close()
    limit_s = RPC_TIMEOUT_S * (not silent) if gone else most_s * len(executor.ranks)
    assert clock.now - began <= limit_s
    for rank in executor.ranks:
        rank.gone = ""
        for queue in rank.queues:
            queue.over()


if __name__ == "__main__":
    from integration.engine.seeds import play

    os._exit(play(run, describe, *sys.argv[1:]))
