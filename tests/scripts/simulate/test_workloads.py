"""Generated traces: the same for a seed, in order, and with the reuse that their names say."""

from __future__ import annotations

from collections import Counter

import pytest

from scripts.simulate.belady import most_hits
from scripts.simulate.trace import BLOCK_TOKENS
from scripts.simulate.workloads import WORKLOADS, generate

ENDLESS = 10**9


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_trace_is_the_same_for_the_same_seed_and_well_formed(name: str) -> None:
    trace = generate(name, seconds=120, seed=3)
    assert trace == generate(name, seconds=120, seed=3) != generate(name, seconds=120, seed=4)
    assert len(trace) > 20
    assert [r.arrival for r in trace] == sorted(r.arrival for r in trace)
    for request in trace:
        assert len(request.keys) == (request.prompt_tokens + request.answer_tokens) // BLOCK_TOKENS
        assert len(set(request.keys)) == len(request.keys)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_key_always_has_the_same_prefix(name: str) -> None:
    before: dict[int, int] = {}
    for request in generate(name, seconds=200):
        for last, key in zip((0, *request.keys), request.keys):
            assert before.setdefault(key, last) == last


def test_what_comes_in_a_scan_never_comes_again() -> None:
    scans = [r for r in generate("scan", seconds=200) if r.keys]
    uses = Counter(key for request in scans for key in request.keys)
    once = sum(1 for n in uses.values() if n == 1)
    assert once > len(uses) / 2


def test_phases_share_nothing_but_what_runs_on() -> None:
    trace = generate("phases", seconds=300)
    first = {key for r in trace if r.arrival < 95 for key in r.keys}
    last = {key for r in trace if r.arrival > 205 for key in r.keys}
    reusable = most_hits(trace, ENDLESS, BLOCK_TOKENS)[1]
    assert reusable > 500
    assert len(first & last) < len(first) / 100
