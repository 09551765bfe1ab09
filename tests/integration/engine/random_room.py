"""Random conversations over vLLM's scheduler whose GPU holds a part of them, the tier all.

Usage: python tests/integration/engine/random_room.py FIRST COUNT

Plays so many seeds, and prints how many tokens were found of those that had been computed before.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(_TESTS.parent), str(_TESTS)]

WINDOWS = ((None,), (None, 32), (None, 48, 64))
_TURNS, _LONGEST = 4, 14  # blocks


def run(seed: int) -> tuple[int, int]:
    """One random run: several conversations at a time, turn by turn.

    Returns:
        Tokens of whole blocks that had been computed before and were found, of how many; those of a
        run in which the GPU lost a block before it could be stored are not counted.

    Raises:
        AssertionError: a wrong token, or a request that does not come to an end.
    """
    from integration.engine.mini import BLOCK, Mini

    rng, windows = random.Random(f"room {seed}"), WINDOWS[seed % len(WINDOWS)]
    mini = Mini(
        blocks=rng.choice([25, 30, 40, 60, 80]) * len(windows), windows=windows,
        late=rng.choice([0, 0, 1, 3]), in_flight=rng.choice([1, 2]),
        load_mode=rng.choice(["auto", "parked", "inline"]),
    )  # fmt: skip
    talks = [_text(rng, rng.randrange(BLOCK, 6 * BLOCK)) for _ in range(rng.randrange(3, 9))]
    known, found, expected = set[tuple[int, ...]](), 0, 0
    for _ in range(_TURNS):
        rng.shuffle(talks)
        left = list(talks)
        while left:
            lot = [left.pop() for _ in range(min(len(left), rng.choice([1, 2, 3, 5])))]
            names = [mini.add(list(talk)) for talk in lot]
            mini.run()
            mini.settle()
            for name, talk in zip(names, lot):
                found += min(mini.hits[name], longest := _longest(known, talk, BLOCK))
                expected += longest
                talk += mini.answers[name]
                ends = range(BLOCK, len(talk), BLOCK)  # the last token is not computed
                known.update(tuple(talk[:end]) for end in ends)
                talk += _text(rng, rng.randrange(1, 2 * BLOCK))
                del talk[_LONGEST * BLOCK :]
    mini.check()
    return (0, 0) if mini.manager.stats.overwritten else (found, expected)


def _text(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, 999) for _ in range(length)]


def _longest(known: set[tuple[int, ...]], talk: list[Any], size: int) -> int:
    """Tokens of whole blocks that are known, but for the last token of the prompt."""
    return max(n for n in range(0, len(talk), size) if not n or tuple(talk[:n]) in known)


def main(first: str, count: str) -> int:
    """Play so many seeds, and say what was lost."""
    results = {seed: run(seed) for seed in range(int(first), int(first) + int(count))}
    found, computed = (sum(column) for column in zip(*results.values()))
    print(f"{found} of {computed} tokens found, by seed: ", end="")
    print({seed: result for seed, result in results.items() if result[0] != result[1]} or "all")
    sys.stdout.flush()
    return int(found != computed)


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))
