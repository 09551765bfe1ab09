"""Steps of the engine, by when tokens came to the clients.

Tokens of a step come together, so times that lie close are one step. What the time to the step
before is, is the kind of a step: one in which a request has its first token (``join``), the one
before such a step (``before a join``), or any other (``decodes``). With asynchronous scheduling a
step's tokens are sent when the next one has been launched, so what the host does for a request that
joins lengthens the step before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

TOGETHER_S = 0.0025  # less than any step of an 8B model's decodes on one GPU (5.7 ms)


def steps(answers: Iterable[Sequence[float]]) -> dict[str, dict[str, Any]]:
    """How many steps there were of each kind, and their mean in milliseconds.

    Args:
        answers: for each request when its tokens came, in seconds.
    """
    came = sorted((at, n == 0) for answer in answers for n, at in enumerate(answer))
    found: list[tuple[float, bool]] = []  # when, and whether a request had its first token
    for at, is_first in came:
        if found and at - found[-1][0] < TOGETHER_S:
            found[-1] = found[-1][0], found[-1][1] or is_first
        else:
            found.append((at, is_first))
    taken: dict[str, list[float]] = {"decodes": [], "before a join": [], "join": []}
    for before, (at, joins), (_, next_joins) in zip(found, found[1:], [*found[2:], (0.0, False)]):
        kind = "join" if joins else "before a join" if next_joins else "decodes"
        taken[kind].append(at - before[0])
    return {
        kind: {"count": len(times), "ms": round(1000 * sum(times) / len(times), 2)}
        for kind, times in taken.items()
        if times
    }
