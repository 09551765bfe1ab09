"""Loads that are compared with checksums: nothing rests on them before, so wrong is a miss."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm")

from integration.engine.mini import FakeRanks, Mini
from scheduler_half.device import LoadFailed
from scheduler_half.scenarios import nothing_held, prompt, talk

from kvoffload_patch.integration.engine.requests import inline
from kvoffload_patch.integration.engine.tuning import SAMPLED_LOADS
from kvoffload_patch.links import LOAD, MISMATCH


def loads(mini: Mini) -> list[Any]:
    return [load for plan in mini.plans for load in plan.before]


def compared(mini: Mini) -> set[int]:
    return {load.ticket for load in loads(mini) if load.compared}


def ask_one_by_one(mini: Mini, prompts: list[list[int]]) -> None:
    for tokens in prompts:
        mini.add(tokens)
        mini.run()


@pytest.fixture
def one_in_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(inline._COMPARED, "sample", 3)


def test_how_many_are_compared() -> None:
    """A first token that waits to be compared must not be among the slowest of a hundred."""
    assert inline._COMPARED == {"off": 0, "sample": SAMPLED_LOADS, "full": 1}
    assert SAMPLED_LOADS > 200


def test_parked_loads_are_compared_no_oftener_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parked load that is compared counts as over later than others: it is among the slowest."""
    monkeypatch.setitem(inline._COMPARED, "sample", 7)
    mini = Mini(load_mode="auto", blocks=60, ranks=FakeRanks(compares=True), max_stall_ms=1e6)
    known = [prompt(6, seed=seed) for seed in range(26)]
    mini.only_in_cpu(*known)
    ask_one_by_one(mini, known[:16])
    assert [n for n, load in enumerate(loads(mini)) if load.compared] == [0, 7, 14]
    mini.tier.change(replace(mini.tier.settings, load_mode="parked"))
    ask_one_by_one(mini, known[16:])
    assert [n for n, load in enumerate(loads(mini)) if load.compared][3:] == [21]
    mini.ask("resume")
    assert mini.desk.status()["compared_loads"] == mini.tier.counts().compared == 4
    mini.check()
    nothing_held(mini)


@pytest.mark.parametrize("integrity", ["sample", "full"])
def test_one_that_waits_for_anothers_load_is_no_load_that_is_compared(integrity: str) -> None:
    """Where some are chosen, the next one that is to be compared would not be."""
    mini = Mini(ranks=FakeRanks(compares=True), late=3, integrity=integrity)
    mini.only_in_cpu(prompt(6, seed=1))
    for _ in range(2):
        mini.add(prompt(6, seed=1))
    mini.run()
    mini.check()
    assert mini.tier.counts().compared == len(compared(mini)) == len(loads(mini)) == 1


@pytest.mark.usefixtures("one_in_three")
@pytest.mark.parametrize("load_mode", ["inline", "auto", "parked"])
@pytest.mark.parametrize("overlap", [True, False], ids=["GPU", "CPU"])
def test_one_load_of_so_many_is_compared_beside_the_step(load_mode: str, overlap: bool) -> None:
    """On the CPU, where copies are not beside it, too; in a mode in which none is parked, none."""
    ranks = FakeRanks(1.0, overlap, compares=True)
    mini = Mini(load_mode=load_mode, blocks=60, ranks=ranks, max_stall_ms=1e6)
    known = [prompt(6, seed=seed) for seed in range(7)]
    mini.only_in_cpu(*known)
    ask_one_by_one(mini, known)
    mini.check()
    parks = load_mode != "inline"
    wanted = [parks, False, False] * 2 + [parks]
    assert [load.compared for load in loads(mini)] == wanted
    parked = 7 if load_mode == "parked" else 3 * parks
    assert (mini.tier._loads.num_inline, mini.tier._loads.num_parked_ever) == (7 - parked, parked)
    nothing_held(mini)


@pytest.mark.parametrize(
    ("integrity", "compares", "wanted"),
    [("off", True, 0), ("full", True, 5), ("full", False, 0), ("sample", True, 1)],
)
def test_all_none_or_the_first(integrity: str, compares: bool, wanted: int) -> None:
    ranks = FakeRanks(compares=compares)
    mini = Mini(load_mode="parked", blocks=60, ranks=ranks, integrity=integrity)
    known = [prompt(6, seed=seed) for seed in range(5)]
    mini.only_in_cpu(*known)
    ask_one_by_one(mini, known)
    assert len(loads(mini)) == 5 and len(compared(mini)) == wanted


@pytest.mark.parametrize(
    ("integrity", "load_mode", "wanted"),
    [("off", "auto", [False, False]), ("full", "auto", [True]), ("off", "parked", [False])],
)
def test_the_last_block_of_a_prompt_is_not_loaded_where_the_step_may_not_wait_for_it(
    integrity: str, load_mode: str, wanted: list[bool]
) -> None:
    """It is loaded within the step that reads it, and so is not known to be right before."""
    ranks = FakeRanks(compares=True)
    mini = Mini(load_mode=load_mode, blocks=60, ranks=ranks, integrity=integrity)
    mini.only_in_cpu(prompt(6, seed=1, tail=0))
    ask_one_by_one(mini, [prompt(6, seed=1, tail=0)])
    assert [load.compared for load in loads(mini)] == wanted
    mini.check()
    nothing_held(mini)


@pytest.mark.usefixtures("one_in_three")
@pytest.mark.parametrize("step_ms", [1.0, 20.0])
def test_it_is_not_promised_before_it_is_known_to_be_right(step_ms: float) -> None:
    """A load that is not compared counts as done once it will be in time for the step."""
    ranks = FakeRanks(0.01, compares=True)
    mini = Mini(load_mode="auto", late=9, in_flight=2, step_ms=step_ms, blocks=90, ranks=ranks)
    known = [prompt(6, seed=seed) for seed in range(9)]
    mini.only_in_cpu(*known)
    mini.add(known[0], count=2)
    mini.run()
    mini.add(prompt(3, seed=99), count=60)  # somebody runs, so that loads are beside steps
    for tokens in known[1:]:
        mini.add(tokens, count=2)
        mini.step()
    mini.run()
    mini.check()
    assert len(compared(mini)) == 3
    for plan in mini.plans:
        for link, ticket in plan.promised:
            assert link == LOAD and (
                ticket not in compared(mini) or ticket <= plan.known_done(LOAD)
            )
    assert {ticket for plan in mini.plans for _, ticket in plan.promised} >= compared(mini)


@pytest.mark.usefixtures("one_in_three")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("load_mode", ["auto", "parked"])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_wrong_bytes_that_are_found_are_recomputed(
    in_flight: int, load_mode: str, seed: int
) -> None:
    """No engine ends, and no token is wrong: only loads that are compared can be found wrong."""
    mini: Any = None

    def fails(direction: str, ticket: int) -> bool:
        return direction == "load" and ticket in compared(mini)

    mini = Mini(
        fails=fails, in_flight=in_flight, late=random.Random(seed).randrange(3),
        load_mode=load_mode, ranks=FakeRanks(compares=True),
    )  # fmt: skip
    talk(mini, seed, turns=5, talks=11)
    assert mini.manager.stats.failed and mini.only_right_tokens()
    nothing_held(mini)


@pytest.mark.usefixtures("one_in_three")
def test_other_loads_within_a_step_still_end_the_engine() -> None:
    """What the test above relies on: promised bytes that cannot be had are raised."""
    mini: Any = None

    def fails(direction: str, ticket: int) -> bool:
        return direction == "load" and ticket not in compared(mini)

    mini = Mini(fails=fails, load_mode="inline", ranks=FakeRanks(compares=True))
    with pytest.raises(LoadFailed):
        talk(mini, 1, turns=5, talks=11)


@pytest.mark.parametrize("load_mode", ["auto", "parked"])
def test_all_are_compared_until_one_has_come_right(load_mode: str) -> None:
    """Also those that begin beside the first one, and a prompt's last block that a step loads."""
    ranks = FakeRanks(compares=True)
    mini = Mini(load_mode=load_mode, blocks=90, late=3, ranks=ranks)
    known = [prompt(6, seed=seed) for seed in range(6)]
    mini.only_in_cpu(*known)
    for tokens in known[:3]:
        mini.add(tokens)
    mini.run()
    assert len(compared(mini)) == len(loads(mini)) == 3
    ask_one_by_one(mini, known[3:])
    mini.check()
    assert len(compared(mini)) == 3 < len(loads(mini))
    nothing_held(mini)


@pytest.mark.parametrize("load_mode", ["auto", "parked"])
def test_once_one_was_found_wrong_all_are_compared(load_mode: str) -> None:
    """What is wrong in every slot is found by the first load, and no other one is read unseen."""
    mini: Any = None

    def fails(direction: str, ticket: int) -> bool:
        return direction == "load" and ticket in compared(mini)

    ranks = FakeRanks(compares=True)
    mini = Mini(fails=fails, load_mode=load_mode, blocks=60, ranks=ranks)
    mini.device.reason = MISMATCH
    known = [prompt(6, seed=seed) for seed in range(5)]
    mini.only_in_cpu(*known)
    ask_one_by_one(mini, known)
    mini.check()
    assert len(compared(mini)) == len(loads(mini)) == 5
    nothing_held(mini)


@pytest.mark.usefixtures("one_in_three")
@pytest.mark.parametrize("load_mode", ["auto", "parked"])
def test_one_that_is_wrong_after_others_were_right_has_all_compared(load_mode: str) -> None:
    """What has gone wrong since then is not read by a load that nobody looks at."""
    mini: Any = None

    def fails(direction: str, ticket: int) -> bool:
        return direction == "load" and sorted(compared(mini))[1:2] == [ticket]

    mini = Mini(fails=fails, load_mode=load_mode, blocks=60, ranks=FakeRanks(compares=True))
    mini.device.reason = MISMATCH
    known = [prompt(6, seed=seed) for seed in range(7)]
    mini.only_in_cpu(*known)
    ask_one_by_one(mini, known)
    mini.check()
    assert [load.compared for load in loads(mini)] == [True, False, False, *4 * [True]]
    nothing_held(mini)


@pytest.mark.parametrize("load_mode", ["auto", "parked"])
def test_what_a_reset_waits_for_has_not_come_right(load_mode: str) -> None:
    """Nobody says how it ended: the first load may have been wrong."""
    ranks = FakeRanks(compares=True)
    mini = Mini(load_mode=load_mode, blocks=60, late=9, ranks=ranks)
    known = [prompt(6, seed=seed) for seed in range(3)]
    mini.only_in_cpu(*known)
    name = mini.add(known[0])
    mini.step()
    mini.abort(name)
    mini.step()
    assert len(loads(mini)) == 1 and mini.tier._loads.under_way
    assert mini.scheduler.reset_prefix_cache()
    mini.only_in_cpu(*known)
    ask_one_by_one(mini, known)
    mini.check()
    assert [load.compared for load in loads(mini)] == [True, True, False, False]
    nothing_held(mini)


@pytest.mark.parametrize("load_mode", ["auto", "parked"])
def test_where_ranks_share_slots_each_must_have_compared_some(load_mode: str) -> None:
    """A rank compares what it has stored: of a load of one block all others have seen nothing."""
    ranks = FakeRanks(compares=True)
    ranks.sharing = 2
    mini = Mini(load_mode=load_mode, blocks=90, ranks=ranks)
    known = [prompt(1, seed=seed) for seed in range(12)]
    mini.only_in_cpu(*known)
    ask_one_by_one(mini, known)
    mini.check()
    turns = [{slot % 2 for slot in load.source_ids} for load in loads(mini)]
    assert all(len(found) == 1 for found in turns)
    first = next(at for at, found in enumerate(turns) if found != turns[0])
    assert [load.compared for load in loads(mini)] == [n <= first for n in range(len(turns))]
    assert 0 < first < len(turns) - 1
    nothing_held(mini)
