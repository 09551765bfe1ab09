"""Random runs over vLLM's scheduler with several ranks.

Usage: python tests/integration/engine/random_ranks.py FIRST COUNT [RELEASE SOURCES]

One run is one seed: what `random_runs` has of requests, commands and settings, and besides how many
ranks there are, what they share, how fast each is and its memory grows, and which copies fail on
which. Every rank must compute upon the right bytes in each step whose tokens the engine gives away,
every request must come to its end, and nothing may be left behind. SOURCES is the folder that has
the release's `vllm/`; without both it is the installed one.
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

_OURS = ("grows", "num_slots", "shards", "late", "unit", "wipe")  # of `random_runs.describe`


def describe(seed: int) -> tuple[Any, dict[str, float], int | None]:
    """The shape of a seed's engine, how many copies fail, and on which rank; None: on any."""
    from integration.engine.modelled_rank import Shape

    rng = random.Random(f"ranks {seed}")
    parts, stages = rng.choice([(2, 1), (2, 1), (3, 1), (1, 2), (2, 2)])
    board = rng.random() < 0.8
    grows = rng.choice([0, 0, 1, 1, 2])
    integrity = rng.choice(["off", "off", "sample", "full"])
    alike = parts > 1 and rng.random() < 0.5
    rates = {"load": rng.choice([0, 0, 0.1, 0.4]), "store": rng.choice([0, 0, 0, 0.3])}
    failing = rng.choice([None, *range(parts * stages)])
    return Shape(parts, stages, alike, board, integrity, grows), rates, failing


def describe_often_whole(seed: int) -> tuple[Any, dict[str, float], int | None]:
    """As `describe`; in two of three runs no copy of the tier fails."""
    shape, rates, failing = describe(seed)
    return shape, rates if seed % 3 == 0 else dict.fromkeys(rates, 0.0), failing


def run(seed: int, *limits: Any) -> Counter[str]:
    """One random run; what has happened in it.

    Args:
        seed: of the run.
        limits: as `random_runs.limits_of` has them.

    Raises:
        AssertionError: something is wrong, or is left behind.
    """
    from integration.engine import random_runs
    from integration.engine.random_users import Users
    from integration.engine.several_ranks import RanksMini, opened

    rng, (shape, rates, failing) = random.Random(seed), describe(seed)
    most, policies = limits or random_runs.limits_of()
    drawn = random_runs.describe(seed, most, policies=policies)
    about = {k: v for k, v in drawn.items() if k not in _OURS}
    if shape.integrity == "full" or (rates["load"] and rng.random() < 0.7):
        about["load_mode"] = "parked"  # not promised before it has come, so it may fail
    users = Users(seed)
    commands = random.Random(f"commands {seed}") if seed % 2 else None
    num_slots = rng.choice([6, 30, 100, 400])
    ranks = opened(shape, num_slots, about["blocks"], about["windows"], rng, rates, failing)
    with ranks as (executor, group):
        mini = RanksMini(
            executor, group, rng, num_slots=num_slots, events=seed % 3 == 0, weighs=False,
            wipe=seed % 5 == 0, integrity=shape.integrity, **users.settings(about, False),
        )  # fmt: skip
        control = _watched(mini, seed) if seed % 4 == 3 else None
        if seed % 4 == 0 and shape.integrity != "full":  # there all loads are compared
            random_runs._looked_at(mini, seed)
        seen = _played(mini, rng, users, commands, shape)
        wrong = +control.found if control is not None else Counter[str]()
        if shape.grows:
            del wrong["resize: another size"]  # until each rank has memory for it
        assert not wrong, wrong
        return seen


def _watched(mini: Any, seed: int) -> Any:
    """With commands between any two steps, and what they are to keep compared."""
    from integration.engine.random_control import Control, command

    rng, control = random.Random(f"between steps {seed}"), Control(mini)
    often, kinds = rng.choice([0.03, 0.2]), ("pause", *["resume"] * 3, "empty", "resize", "set")

    def perhaps() -> None:
        if rng.random() < often and not mini.breaker.detached:
            command(mini, rng, kinds, mini.ranks.num_slots // 3 or 1)

    control.within = perhaps
    return control


def _played(
    mini: Any, rng: random.Random, users: Any, commands: Any, shape: Any, connector: Any = None
) -> Counter[str]:
    from integration.engine import random_runs
    from integration.engine.several_ranks import Died
    from scheduler_half.scenarios import nothing_held

    from kvoffload_patch.integration.errors import PromiseBroken

    try:
        asked = random_runs._play(mini, rng, users, commands, None, connector)
        random_runs._end(mini, connector)
    except (Died, PromiseBroken, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "kvoffload_patch: expected" not in f"{error}":
            raise
        # A load that a step reads is a promise: the engine ends, and no wrong token has come out.
        assert _may_end(mini.executor.ranks, shape), "the engine has ended for no reason"
        assert mini.only_right_tokens()
        return _seen(mini) + Counter({"ended": 1, f"ended by {type(error).__name__}": 1})
    users.check(mini)
    mini.check()
    mini.ask("resume")
    nothing_held(mini)
    assert not mini.breaker.detached, mini.breaker.failure
    # Loads that are all compared are parked.
    refused = [one for one in asked if one.error and "KVOFFLOAD_INTEGRITY" not in one.error]
    assert not refused and all(one.done.is_set() for one in asked)
    return _seen(mini)


def _may_end(ranks: Any, shape: Any) -> bool:
    """Whether a step may lack what it was promised.

    Where ranks share memory only a load that fails is lost on the engine; where they do not, nor
    does it hear what one of them could not store, or has found wrong.
    """
    unheard = any(rank.failed["store"] or rank.corrupted for rank in ranks)
    return any(rank.failed["load"] for rank in ranks) or (unheard and not shape.board)


def _seen(mini: Any) -> Counter[str]:
    stats, ranks = mini.manager.stats, mini.executor.ranks
    seen = Counter[str](runs=1)
    for name in ("loaded", "stored", "evicted", "failed", "mismatches"):
        seen[name] = getattr(stats, name)
    seen["resumed"] = ranks[0].resumed
    for name in ("load", "store"):
        seen[f"failed {name}s"] = sum(rank.failed[name] for rank in ranks)
    seen["corrupted"] = sum(rank.corrupted for rank in ranks)
    seen["waited for slots"] = sum(rank.memory.waited for rank in ranks if rank.memory is not None)
    seen["calls"], seen["compared"] = mini.executor.calls, mini.compared
    seen["compared blocks"] = mini.compared_blocks
    return seen


if __name__ == "__main__":
    from integration.engine.seeds import play

    os._exit(play(run, describe, *sys.argv[1:]))
