"""Random runs with several ranks beside a KV connector whose loads fail on some of them.

Usage: python tests/integration/engine/random_invalid.py FIRST COUNT [RELEASE SOURCES]

What `random_ranks.py` plays, beside a connector that loads within the step or beside it, and under
both policies for loads that fail. Copies of the tier are late, shared, compared and fail as there.
No token that is given away may rest on an invalid block, on any rank, nor may a slot hold one.
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
    from integration.engine import connected_ranks, random_ranks, random_runs
    from integration.engine.random_users import Users
    from integration.engine.several_ranks import opened

    rng, (shape, rates, failing) = random.Random(f"invalid {seed}"), describe(seed)
    most, policies = limits or random_runs.limits_of()
    # Where more steps are under way vLLM itself answers wrongly after a load that has failed.
    most = most if seed % 8 == 7 else 1
    drawn = random_runs.describe(seed, most, policies=policies)
    about = {k: v for k, v in drawn.items() if k not in random_ranks._OURS}
    if shape.integrity == "full" or (rates["load"] and rng.random() < 0.7):
        about["load_mode"] = "parked"
    if seed % 8 < 7:  # vLLM is told of blocks that were not filled in a single group only
        # What it computes again is wrong where a window's first blocks were not filled.
        about["windows"] = (rng.choice([None, 40]) if seed % 2 == 0 else None,)
        about["retention"] = None
    users, num_slots = Users(seed), rng.choice([6, 30, 100, 400])
    commands = random.Random(f"commands {seed}") if seed % 2 else None
    # What has failed is known when a copy is enqueued, and on these streams only when it is made.
    kind = connected_ranks.ConnectedRank if seed % 3 == 0 else connected_ranks.StreamRank
    ranks = opened(shape, num_slots, about["blocks"], about["windows"], rng, rates, failing, kind)
    with ranks as (executor, group):
        mini = connected_ranks.ConnectedRanks(
            executor, group, rng, num_slots=num_slots, events=seed % 3 == 0, weighs=False,
            wipe=seed % 5 == 0, integrity=shape.integrity, **users.settings(about, False),
        )  # fmt: skip
        connector = connected_ranks.RanksConnector(mini, seed)
        mini.leaves = 0.2 if seed % 5 == 1 else 0.0
        seen = random_ranks._played(mini, rng, users, commands, shape, connector)
        for name in ("loads", "failed", "alone", "sent"):
            seen[f"connector {name}"] = getattr(connector, name)
        seen["left"] = mini.left
        policy = "ends" if connector._ends else "recomputes"
        how = f"{'beside' if connector._beside else 'within'}, {policy}"
        return seen + Counter({how: bool(connector.failed)})


if __name__ == "__main__":
    from integration.engine.seeds import play

    os._exit(play(run, describe, *sys.argv[1:]))
