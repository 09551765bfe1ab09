"""Which leaves the tier first, the last state of a prefix or its blocks.

`python tests/integration/engine/adapters/state_order.py SEED COUNT` plays conversations on vLLM's
own scheduler over a model half of whose layers keep a state, with a tier too small for them, in
both orders. Prints one JSON object: prompt tokens that were hits, and blocks that were stored, of
COUNT seeds from SEED on.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[3]
if __name__ == "__main__":
    sys.path[:0] = [str(_TESTS.parent), str(_TESTS)]

AS_IT_IS, STATES_LAST = "blocks and states from the tail", "states last"
_TALKS, _TURNS, _SLOTS = 12, 5, (60, 120, 180)


def states_last(groups: Any, keys: Iterable[Hashable]) -> tuple[list[Hashable], dict[Any, Any]]:
    """The other order: all blocks of attention rest on the states, and the last state on none."""
    from kvoffload_patch.integration.engine.adapters.prefix_groups import split

    given = list(keys)
    states = [key for key in given if split(key)[1] != groups.first]
    return [*states[::-1], *(key for key in given if split(key)[1] == groups.first)], {}


def play(seed: int, order: str) -> dict[str, int]:
    """Conversations that take turns at random, each prompt with all that was said before."""
    from integration.engine.mini import Mini
    from scheduler_half.scenarios import prompt
    from scheduler_half.states import STATE

    from kvoffload_patch.integration.engine.adapters.prefix_groups import PrefixGroups

    as_made, rng = PrefixGroups.in_order, random.Random(seed)
    if order == STATES_LAST:
        PrefixGroups.in_order = states_last  # type: ignore[method-assign]
    try:
        slots = rng.choice(_SLOTS)
        mini = Mini(
            load_mode="inline", store="eager", windows=(None, STATE), blocks=60, num_slots=slots,
            eviction="lru",
        )  # fmt: skip
        common = prompt(4, seed=1, tail=0)
        talks = [common + prompt(rng.randrange(1, 8), seed=10 + at) for at in range(_TALKS)]
        asked = hits = 0
        for turn in range(_TALKS * _TURNS):
            talk = talks[min(int(rng.expovariate(0.25)), _TALKS - 1)]
            if len(talk) > 300:
                continue
            name = mini.add(list(talk), count=6)
            mini.run()
            asked, hits = asked + len(talk), hits + mini.hits[name]
            talk += mini.answers[name] + prompt(rng.randrange(3), seed=1000 + turn, tail=9)
        mini.check()
        assert not mini.breaker.detached, mini.breaker.failure  # plain vLLM is right, too
    finally:
        PrefixGroups.in_order = as_made  # type: ignore[method-assign]
    return {"asked": asked, "hits": hits, "stored": mini.manager.stats.stored}


def main(seed: str, count: str) -> None:
    """Both orders of each seed, added up."""
    seen: dict[str, dict[str, int]] = {order: {} for order in (AS_IT_IS, STATES_LAST)}
    for at in range(int(seed), int(seed) + int(count)):
        for order, sums in seen.items():
            for name, number in play(at, order).items():
                sums[name] = sums.get(name, 0) + number
    print(json.dumps(seen, indent=1))
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # what vLLM has imported may keep threads of its own
