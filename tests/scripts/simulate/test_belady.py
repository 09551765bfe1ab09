"""The optimum, on a trace that is worked out by hand, and never worse than any policy."""

from __future__ import annotations

import random

import pytest

from scripts.simulate.belady import most_hits
from scripts.simulate.model import Machine, Model
from scripts.simulate.sides import SIDES
from scripts.simulate.trace import Request

BLOCK = 4


def asked(at: float, *keys: int, answer: int = 0) -> Request:
    """A prompt of these blocks and one token more; an answer of so many further blocks."""
    return Request(at, (len(keys) - answer) * BLOCK + 1, answer * BLOCK, keys)


def test_what_is_used_last_is_given_up() -> None:
    trace = [asked(0, 1, 2), asked(1, 3), asked(2, 1, 2), asked(3, 3), asked(4, 1, 2)]
    assert most_hits(trace, 3, BLOCK) == (5, 5)
    assert most_hits(trace, 2, BLOCK) == (4, 5), "3 is given up for 1 and 2, which come before it"
    assert most_hits(trace, 1, BLOCK) == (2, 5)
    assert most_hits(trace, 0, BLOCK) == (0, 5)


def test_a_block_that_is_made_again_anyway_need_not_be_kept() -> None:
    trace = [asked(0, 1), Request(1, BLOCK, 0, (1,)), asked(2, 2), asked(3, 1), asked(4, 2)]
    # Between the first two nothing is kept: the last block of a prompt is always computed.
    assert most_hits(trace, 1, BLOCK) == (1, 2)
    assert most_hits(trace, 2, BLOCK) == (2, 2)


def test_answers_are_found() -> None:
    assert most_hits([asked(0, 1, 2, answer=1), asked(1, 1, 2, 3)], 2, BLOCK) == (2, 2)


def crowd(seed: int) -> list[Request]:
    """Sessions that share beginnings, in a small world."""
    rng = random.Random(seed)
    sessions = [[1000 + rng.randrange(2)] for _ in range(12)]
    ids = iter(range(2000, 10**6))
    trace, at = [], 0.0
    for _ in range(150):
        keys = rng.choice(sessions)
        if len(keys) > 6:
            del keys[1:]
        keys += [next(ids) for _ in range(rng.choice([1, 2]))]
        at += rng.choice([0.0, 0.01, 0.3])
        trace.append(asked(at, *keys, answer=rng.randrange(2)))
    return trace


@pytest.mark.parametrize("seed", range(4))
def test_no_side_finds_more(seed: int) -> None:
    trace = crowd(seed)
    for cpu_blocks in (4, 20):
        machine = Machine(
            gpu_blocks=12, cpu_blocks=cpu_blocks, block_tokens=BLOCK, step_tokens=8, prefill=200
        )
        best, reusable = most_hits(trace, 12 + cpu_blocks, BLOCK)
        for side in SIDES.values():
            found = Model(machine, side.rules(machine), trace).run()
            assert found.hits_gpu + found.hits_tier <= best <= reusable
