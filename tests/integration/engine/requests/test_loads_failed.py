"""Copies that fail: no wrong token, no hang, no lost block, on vLLM's own scheduler."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from integration.engine.mini import BLOCK, Mini
from scheduler_half.device import LoadFailed
from scheduler_half.scenarios import nothing_held, prompt, stale_load, talk
from vllm.v1.request import RequestStatus

from kvoffload_patch.links import LOAD


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("in_flight", [1, 2])
def test_answers_are_right_whatever_fails_beside_the_step(in_flight: int, seed: int) -> None:
    rng = random.Random(seed)
    rate = {"load": rng.choice([0.3, 0.6]), "store": rng.choice([0.0, 0.2])}
    mini = Mini(
        fails=lambda direction, ticket: rng.random() < rate[direction],
        in_flight=in_flight,
        late=rng.randrange(3),
        load_mode="parked",
    )
    talk(mini, seed, turns=5, talks=11)
    stats = mini.manager.stats
    assert stats.failed and stats.loaded and stats.stored
    nothing_held(mini)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("load_mode", ["inline", "auto"])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_load_that_a_step_reads_ends_the_engine_before_a_wrong_token(
    in_flight: int, load_mode: str, seed: int
) -> None:
    rng = random.Random(seed)
    first = rng.randrange(1, 12)
    mini = Mini(
        fails=lambda direction, ticket: direction == "load" and ticket >= first,
        in_flight=in_flight,
        late=rng.randrange(3),
        load_mode=load_mode,
    )
    with pytest.raises(LoadFailed):
        talk(mini, seed, turns=5, talks=11)
    assert mini.only_right_tokens()


def test_a_parked_load_before_an_inline_one_may_still_fail() -> None:
    """The step waits for both and reads one; the other is recomputed by who wants it."""
    mini = Mini(
        fails=lambda direction, ticket: direction == "load" and ticket == 2,
        blocks=129,
        load_mode="auto",
        late=20,
        max_stall_ms=60,
    )
    known = [prompt(60, seed=1), prompt(10, seed=2), prompt(1, seed=3)]
    mini.only_in_cpu(*known)
    mini.add(known[0])
    mini.add(known[1])
    mini.begin_step()
    assert [load.ticket for load in mini.plans[-1].before] == [1, 2]
    assert mini.plans[-1].promised == ((LOAD, 1),)
    mini.end_step()
    mini.add(known[2])
    mini.begin_step()
    assert mini.plans[-1].promised == mini.plans[-1].waits == ((LOAD, 3),)
    mini.end_step()
    mini.run()
    mini.check()
    assert mini.manager.stats.failed == 10
    nothing_held(mini)


def test_who_hits_what_a_parked_load_brings_waits_for_it() -> None:
    """Its own load could be within the step; that of the blocks before it may still fail."""
    mini = Mini(
        fails=lambda direction, ticket: direction == "load" and ticket == 1,
        load_mode="parked",
        late=20,
        max_stall_ms=1000,
    )
    mini.only_in_cpu(prompt(8, seed=1))
    mini.add(prompt(1, seed=2), count=20)
    mini.step()
    begins = mini.add(prompt(8, seed=1)[: 6 * BLOCK + 1])
    mini.step()
    mini.ask("set", load_mode="auto")
    goes_on = mini.add(prompt(8, seed=1))
    mini.step()
    assert [mini.scheduler.requests[name].status.name for name in (begins, goes_on)] == [
        "WAITING_FOR_REMOTE_KVS"
    ] * 2
    mini.run()
    mini.check()
    nothing_held(mini)


def test_the_last_block_of_a_prompt_does_not_arrive_and_another_has_computed_on_it() -> None:
    """Both are admitted in one schedule(): the second reads a block that the first would load."""
    failed: set[int] = set()
    mini = Mini(
        fails=lambda direction, ticket: direction == "load" and ticket in failed,
        load_mode="inline",
        blocks=60,
    )
    whole, more = prompt(4, seed=1, tail=0), prompt(2, seed=2, tail=5)
    mini.only_in_cpu(whole)
    mini.add([*whole[: 3 * BLOCK], 5], count=1)  # three of the four are on the GPU again
    mini.run()
    mini.settle()
    # So many wait for something else that vLLM may admit requests that were not looked up.
    for n in range(80):
        request = mini.scheduler.requests[mini.add(prompt(1, seed=500 + n), count=1)]
        request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        request.structured_output_request = SimpleNamespace(grammar=None)
    first, second = mini.add(whole, count=2), mini.add([*whole, *more], count=2)
    ticket = mini.manager.drained().done_on(LOAD) + 1
    failed.add(ticket)
    with pytest.raises(LoadFailed):
        mini.begin_step()
    assert mini.plans[-1].promised == ((LOAD, ticket),)
    assert [mini.hits[name] for name in (first, second)] == [4 * BLOCK - 1, 4 * BLOCK]
    assert mini.answers[first] == mini.answers[second] == []


@pytest.mark.parametrize("fails", [True, False])
def test_tokens_whose_load_failed_are_no_hits(fails: bool) -> None:
    mini = Mini(fails=lambda direction, _: fails and direction == "load", load_mode="parked")
    prompt = list(range(100, 100 + 4 * BLOCK + 1))
    mini.only_in_cpu(prompt)
    report = mini.tier._report
    before = report.hit, report.queried
    for _ in range(2):
        mini.add(prompt)
    mini.run()
    mini.check()
    assert report.hit - before[0] == (0 if fails else 4 * BLOCK), "the other one found it loaded"
    assert report.queried > before[1]


def test_what_was_loaded_for_other_weights_is_not_published() -> None:
    assert stale_load("parked")["loaded"] == 6
