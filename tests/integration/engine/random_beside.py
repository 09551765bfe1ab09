"""Random requests beside a KV connector, and the same with one of both or none of it.

Usage: python tests/integration/engine/random_beside.py FIRST COUNT [together]

Four engines are asked for the same, one request after another: one has the connector alone, one the
tier alone, one both, and one the tier and a connector that finds nothing. GPUs lose blocks that the
tier has. With both, no request computes more than with the connector alone; beside a connector that
finds nothing each hits what it hits without; and vLLM counts each token of a prompt once.
"""

from __future__ import annotations

import os
import random
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(_TESTS.parent), str(_TESTS)]

WINDOWS = ((None,), (None,), (40,), (None, 40))
_REQUESTS, _LONGEST = 25, 300
_SLOTS, _MOST_STEPS = 4000, 2000


def describe(seed: int) -> dict[str, Any]:
    """What all engines of a seed are like, as arguments of `Mini`."""
    rng, windows = random.Random(f"beside {seed}"), WINDOWS[seed % len(WINDOWS)]
    return {
        "windows": windows, "blocks": rng.choice([30, 60, 1200]) * len(windows),
        "in_flight": rng.choice([1, 1, 2]), "policy": rng.choice(["fcfs", "priority"]),
        "limits": {"max_num_batched_tokens": rng.choice([64, 256])},
    }  # fmt: skip


def run(seed: int) -> Counter[str]:
    """One random run; what has happened in it.

    Raises:
        AssertionError: a request is worse off, or something is wrong, or left behind.
    """
    from integration.engine.connected import Connected
    from integration.engine.mini import BLOCK

    about, tier = describe(seed), _tier(seed)
    played = {
        "alone": Connected(seed, True, tier=False, **about),
        "both": Connected(seed, True, **about, **tier),
        "empty": Connected(seed, False, **about, **tier),
        "tier": Connected(seed, None, **about, **tier),
    }
    for mini in played.values():
        _play(mini, seed)
    alone, both, empty, by_tier = played.values()
    more = {
        name: (len(both.prompts[name]), tokens, alone.computed[name])
        for name, tokens in both.computed.items()
        if tokens > alone.computed[name]
    }
    assert not more, f"of (prompt, computed, with the connector alone): {more}"
    for name, hit in by_tier.hits.items():
        length, found = len(empty.prompts[name]), empty.hits[name]
        # Beside a connector the last block of a prompt is not loaded.
        whole = length % BLOCK == 0 and hit == length - 1 and found == length - BLOCK
        assert found == hit or whole, f"of {length} tokens: {hit}, beside a connector {found}"
    for which, mini in played.items():
        mini.check_figures(which)
    return Counter(
        {
            "runs": 1, "loaded": both.manager.stats.loaded, "brought": both.brought,
            "brought alone": alone.brought, "sent": both.sent, "waited": both.waited,
            "hit by the tier": sum(by_tier.hits.values()), "failed": both.num_failed,
            "computed": sum(both.computed.values()),
            "computed alone": sum(alone.computed.values()),
        }
    )  # fmt: skip


def run_together(seed: int) -> Counter[str]:
    """The same with requests that overlap, some of which are aborted; what has happened.

    How much each computes then depends on the step in which it is admitted, so that this is not
    compared. A run that plain vLLM beside the connector does not bring to its end is left out.

    Raises:
        AssertionError: something is wrong, or left behind.
    """
    from integration.engine.connected import Connected

    alone = Connected(seed, True, tier=False, **describe(seed))
    try:
        _play(alone, seed, together=True)
    except AssertionError:
        return Counter({"left out": 1})
    both = Connected(seed, True, **describe(seed), **_tier(seed))
    _play(both, seed, together=True)
    return Counter(
        {
            "runs": 1, "loaded": both.manager.stats.loaded, "brought": both.brought,
            "sent": both.sent, "failed": both.num_failed, "preempted": both.preempted,
            "computed": sum(both.computed.values()),
            "computed alone": sum(alone.computed.values()),
        }
    )  # fmt: skip


def _tier(seed: int) -> dict[str, Any]:
    rng = random.Random(f"tier {seed}")
    return {
        "load_mode": rng.choice(["auto", "inline", "parked"]), "late": rng.choice([0, 1, 3]),
        "num_slots": _SLOTS, "store": "eager", "events": seed % 3 == 0,
    }  # fmt: skip


def _play(mini: Any, seed: int, together: bool = False) -> None:
    from integration.engine.random_hits import _lose
    from scheduler_half.scenarios import nothing_held, prompt

    rng, losses = random.Random(f"asked {seed}"), random.Random(f"lost {seed}")
    known = [prompt(rng.randrange(1, 10), rng.randrange(10**6), rng.choice([0, 1, 7]))]
    for _ in range(_REQUESTS):
        beginning = rng.choice(known)[: rng.choice([20, 70, _LONGEST])]
        own = prompt(rng.choice([0, 0, 1, 4]), rng.randrange(10**6), rng.choice([0, 1, 9]))
        asked, count = beginning + own, rng.choice([1, 2, 20, 40])
        asked = asked[: _LONGEST - count] or [5]
        mini.show(asked, random.Random(rng.randrange(10**9)))
        name = mini.add(asked, count, rng.randrange(3))
        known.append(asked)
        for _ in range(rng.choice([0, 1, 2, 5, 20]) if together else _MOST_STEPS):
            if mini.queue or mini.scheduler.has_requests():
                mini.step()
        if together and rng.random() < 0.1:
            mini.abort(name)
        if not together:
            mini.settle()
        _lose(mini, losses)
    for _ in range(_MOST_STEPS):
        if mini.queue or mini.scheduler.has_requests():
            mini.step()
    mini.check()
    if mini.tier is not None:
        nothing_held(mini)


def main(first: str, count: str, how: str = "alone") -> int:
    """Play so many seeds, and say what came out."""
    seen, failed = Counter[str](), list[int]()
    for seed in range(int(first), int(first) + int(count)):
        try:
            seen += run(seed) if how == "alone" else run_together(seed)
        except Exception:  # noqa: BLE001 - it is what came out
            failed.append(seed)
            told = "".join(traceback.format_exc().splitlines(True)[-8:])
            print(f"seed {seed}: {describe(seed)}\n{told}", flush=True)
    print(f"{dict(seen)}; failed: {failed}", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))
