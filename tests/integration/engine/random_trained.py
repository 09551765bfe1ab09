"""Random runs with several ranks whose weights change, and which may not answer.

Usage: python tests/integration/engine/random_trained.py FIRST COUNT [RELEASE SOURCES]

What `random_ranks.py` plays, with a trainer: it puts the engine to sleep, and changes the weights
of all ranks or of some, which do it before or behind others. In some runs a call of the tier's is
raised by a rank, or is not answered in time. No step may read what was computed with other weights,
and where the tier cannot go on the engine ends or serves without it.
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


class Unanswered:
    """Makes calls of the tier fail: a rank raises, or none is waited for any longer.

    Args:
        executor: whose calls they are.
        seed: of the run.
    """

    def __init__(self, executor: Any, seed: int) -> None:
        self._rng, self._executor = random.Random(f"unanswered {seed}"), executor
        self._often = self._rng.choice([0, 0, 0.02, 0.1])
        self._call, executor.collective_rpc = executor.collective_rpc, self.collective_rpc
        self.raised = self.late = 0

    def collective_rpc(self, function: Any, timeout: float, args: tuple[Any, ...]) -> Any:
        """As the executor's."""
        if self._rng.random() >= self._often:
            return self._call(function, timeout=timeout, args=args)
        if self._rng.random() < 0.5:
            self.late += 1
            for rank in self._executor.ranks:
                rank.sent.append(_Late(function, rank, args))
            raise TimeoutError("RPC call timed out")
        self.raised += 1
        raising = self._rng.choice(self._executor.ranks)

        def call(rank: Any, *given: Any) -> Any:
            return (False, "OSError") if rank is raising else function(rank, *given)

        call.__name__ = function.__name__ if hasattr(function, "__name__") else "call"
        return self._call(call, timeout=timeout, args=args)

    def over(self) -> None:
        """All answer from now on."""
        self._often = 0


class _Late:
    """A call that is carried out when its rank comes to it, and whose answer nobody reads."""

    def __init__(self, *call: Any) -> None:
        self._call = call

    def __call__(self) -> None:
        function, rank, args = self._call
        function(rank, *args)


def describe(seed: int) -> Any:
    """As `random_ranks` has it."""
    from integration.engine.random_ranks import describe_often_whole

    return describe_often_whole(seed)


def run(seed: int, *limits: Any) -> Counter[str]:
    """One random run; what has happened in it.

    Args:
        seed: of the run.
        limits: as `random_runs.limits_of` has them.

    Raises:
        AssertionError: something is wrong, or is left behind.
    """
    from integration.engine import random_ranks, random_runs
    from integration.engine.random_users import Users
    from integration.engine.several_ranks import RanksMini, opened
    from integration.engine.trained_ranks import RanksTrainer, TrainedRank

    rng, (shape, rates, failing) = random.Random(f"trained {seed}"), describe(seed)
    most, policies = limits or random_runs.limits_of()
    drawn = random_runs.describe(seed, most, policies=policies)
    about = {k: v for k, v in drawn.items() if k not in random_ranks._OURS}
    if shape.integrity == "full" or rates["load"]:
        about["load_mode"] = "parked"
    users, events = Users(seed), seed % 4 == 0
    commands = random.Random(f"commands {seed}") if seed % 2 and not users.alone else None
    num_slots, wipe = rng.choice([30, 100, 400]), seed % 5 == 0
    ranks = opened(
        shape, num_slots, about["blocks"], about["windows"], rng, rates, failing, TrainedRank
    )
    with ranks as (executor, group):
        mini = RanksMini(
            executor, group, rng, num_slots=num_slots, events=events, weighs=False, wipe=wipe,
            integrity=shape.integrity, **users.settings(about, False),
        )  # fmt: skip
        watched = not events and not wipe and hasattr(mini.scheduler, "pause_state")
        trainer, unanswered = RanksTrainer(mini, seed, watched), Unanswered(executor, seed)
        seen = _played(mini, rng, users, commands, shape, trainer, unanswered)
        seen["stale"] = sum(rank.stale for rank in executor.ranks)
        seen["raised"], seen["late"] = unanswered.raised, unanswered.late
        return seen + trainer.seen


def _played(
    mini: Any, rng: random.Random, users: Any, commands: Any, shape: Any, trainer: Any,
    unanswered: Unanswered,
) -> Counter[str]:  # fmt: skip
    from integration.engine import random_ranks, random_runs
    from integration.engine.several_ranks import Died
    from scheduler_half.scenarios import nothing_held

    from kvoffload_patch.integration.errors import PromiseBroken

    try:
        random_runs._play(mini, rng, users, commands, trainer, None)
        mini.run(steps=random_runs._MAX_STEPS)
    except (Died, PromiseBroken, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "kvoffload_patch: " not in f"{error}":
            raise
        may = random_ranks._may_end(mini.executor.ranks, shape)
        assert may or unanswered.late or unanswered.raised, "the engine has ended for no reason"
        assert mini.only_right_tokens()
        return random_ranks._seen(mini) + Counter({"ended": 1})
    users.check(mini)
    mini.check()
    seen = random_ranks._seen(mini)
    if mini.breaker.detached:
        assert unanswered.raised or unanswered.late, mini.breaker.failure
        return seen + Counter({"detached": 1})
    unanswered.over()
    mini.ask("resume")
    nothing_held(mini)
    return seen


if __name__ == "__main__":
    from integration.engine.seeds import play

    os._exit(play(run, describe, *sys.argv[1:]))
