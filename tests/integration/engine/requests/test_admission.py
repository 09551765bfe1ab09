"""Whom vLLM's own scheduler admits beside hits that wait for room, or for the bus."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from integration.engine.connectors import Connector
from integration.engine.mini import BLOCK, FakeRanks, Mini
from integration.engine.random_adapters import adapter
from scheduler_half.scenarios import (
    behind_stores,
    behind_the_bus,
    nothing_held,
    priority_behind_the_bus,
    running_prompt,
)
from vllm.v1.request import RequestStatus

from kvoffload_patch.integration.engine.requests.admission import AdmissionBudget
from kvoffload_patch.links import LOAD

BUS_MS = 150


def prompt(blocks: int, seed: int, tail: int = 1) -> list[int]:
    """A prompt of so many full blocks, and ``tail`` tokens behind them."""
    rng = random.Random(seed)
    return [rng.randrange(3, 999) for _ in range(blocks * BLOCK + tail)]


class Tight:
    """Our count of free GPU blocks falls short of vLLM's by ``blocks``."""

    def __init__(self, mini: Mini, blocks: int) -> None:
        self.blocks = blocks
        count = mini.view.num_free_blocks
        mini.view.num_free_blocks = lambda: count() - self.blocks


def names(requests: list[Any]) -> list[str]:
    return [request.request_id for request in requests]


def limit(mini: Mini) -> int:
    """How many requests vLLM lets run."""
    scheduler = mini.scheduler
    return getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs)


# AdmissionBudget


@pytest.mark.parametrize("load_mode", ["inline", "parked"])
def test_a_prompt_under_way_takes_the_tokens_of_a_step_once(load_mode: str) -> None:
    """Not those of a decode besides: the last token of a step is somebody's."""
    limits = {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 21}
    admitted = []
    for tier in (False, True):
        mini = Mini(load_mode=load_mode, limits=limits, blocks=49, tier=tier)
        mini.scheduler.max_num_scheduled_tokens = 64
        for seed in range(3):
            mini.add(prompt(6, seed=seed), count=1)
        mini.step()
        name = mini.add(prompt(1, seed=9), count=1)
        steps = 0
        while name not in mini.hits:
            mini.step()
            steps += 1
        admitted.append(steps)
        mini.run()
        mini.check()
    assert admitted == [1, 1]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("adaptive", [False, True])
def test_what_a_step_gives_to_one_prompt_is_known(adaptive: bool, count: int) -> None:
    """Also where one has the step to itself, and where all have their share, from 0.31 on."""
    limits = {"max_num_batched_tokens": 90, "long_prefill_token_threshold": 8}
    mini = Mini(blocks=201, limits=limits)
    if not hasattr(mini.scheduler, "adaptive_long_prefill_threshold"):
        pytest.skip("this release has a fixed number")
    mini.scheduler.adaptive_long_prefill_threshold = adaptive
    mini.scheduler.max_num_scheduled_tokens = 80  # fewer, as with drafts
    for seed in range(count):
        mini.add(prompt(30, seed=seed), count=1)
    known = mini.view.prompt_tokens_in_step()
    got = mini.begin_step().num_scheduled_tokens.values()
    assert known == max(got)
    mini.end_step()


@pytest.mark.parametrize("load_mode", ["inline", "parked"])
def test_a_hit_whose_adapter_is_one_too_many_keeps_nobody_waiting(load_mode: str) -> None:
    """vLLM passes over it, whether there is room for it or not."""
    mini = Mini(load_mode=load_mode)
    config = SimpleNamespace(max_loras=1)
    mini.scheduler.lora_config = mini.scheduler.vllm_config.lora_config = config
    one, other = {"lora_request": adapter("a", 1)}, {"lora_request": adapter("b", 2)}
    known = prompt(18, seed=1)
    mini.add(known, count=1, **other)
    mini.run()
    mini.only_in_cpu()
    runs = mini.add(prompt(7, seed=2), count=50, **one)
    mini.step()
    hit, behind = mini.add([*known, 3], **other), mini.add(prompt(1, seed=3), **one)
    while behind in mini.scheduler.requests:
        mini.step()
    assert runs in mini.scheduler.requests and hit not in mini.hits
    mini.run()
    mini.check()
    assert mini.hits[hit] == 18 * BLOCK, "it is loaded once its adapter can be"
    nothing_held(mini)


@pytest.mark.parametrize("load_mode", ["inline", "parked"])
def test_nor_does_one_whose_adapter_is_too_many_beside_one_admitted_in_the_same_step(
    load_mode: str,
) -> None:
    """A load would have no reader, and would take the room of those behind it."""
    mini = Mini(load_mode=load_mode)
    mini.scheduler.lora_config = mini.scheduler.vllm_config.lora_config = SimpleNamespace(
        max_loras=1
    )
    known, other = prompt(18, seed=1), {"lora_request": adapter("b", 2)}
    mini.add(known, count=1, **other)
    mini.run()
    mini.only_in_cpu()
    loaded = mini.manager.stats.loaded
    one = mini.add(prompt(1, seed=2), count=9, lora_request=adapter("a", 1))
    hit, behind = mini.add([*known, 3], **other), mini.add(prompt(7, seed=3))
    mini.step()
    assert names(mini.scheduler.running) == [one, behind]
    assert mini.manager.stats.loaded == loaded and not any(plan.before for plan in mini.plans[-1:])
    mini.run()
    mini.check()
    assert mini.hits[hit] == 18 * BLOCK
    nothing_held(mini)


@pytest.mark.parametrize("load_mode", ["inline", "parked"])
def test_a_hit_without_room_is_not_admitted_without_it_while_others_run(load_mode: str) -> None:
    mini = Mini(load_mode=load_mode)
    mini.only_in_cpu(prompt(6, seed=1))
    tight = Tight(mini, 15)
    running = mini.add(prompt(2, seed=2), count=20)
    mini.step()
    hit, behind = mini.add(prompt(6, seed=1)), mini.add(prompt(1, seed=3))
    for _ in range(5):
        mini.step()
        assert names(mini.scheduler.running) == [running]
        assert limit(mini) == 8
    tight.blocks = 0
    mini.run()
    assert mini.hits[hit] == 6 * BLOCK
    assert list(mini.hits)[2:] == [*sorted([hit, behind], reverse=load_mode == "parked")]
    mini.check()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_hit_that_never_has_room_is_admitted_when_the_others_are_done(in_flight: int) -> None:
    mini = Mini(in_flight=in_flight)
    mini.only_in_cpu(prompt(6, seed=1))
    Tight(mini, 20)
    running = mini.add(prompt(2, seed=2), count=6)
    mini.step()
    hit = mini.add(prompt(6, seed=1))
    while running in mini.scheduler.requests:
        assert hit not in mini.hits
        mini.step()
    mini.run(steps=20)
    assert mini.hits[hit] == 0
    mini.check()


def test_a_hit_that_never_has_room_is_admitted_if_nothing_runs() -> None:
    mini = Mini()
    mini.only_in_cpu(prompt(6, seed=1))
    Tight(mini, 20)
    hit = mini.add(prompt(6, seed=1))
    mini.begin_step()
    assert hit in mini.hits


def test_a_hit_without_room_waits_for_one_that_is_parked_in_the_same_step() -> None:
    mini = Mini(load_mode="parked", late=3)
    mini.only_in_cpu(prompt(6, seed=1), prompt(11, seed=2))
    hits = [mini.add(prompt(6, seed=1, tail=6 * BLOCK + 1)), mini.add(prompt(11, seed=2))]
    mini.step()
    assert not mini.scheduler.running
    assert [mini.scheduler.requests[name].status.name for name in hits] == [
        "WAITING_FOR_REMOTE_KVS",
        "WAITING",
    ]
    mini.run()
    assert [mini.hits[name] for name in hits] == [6 * BLOCK, 11 * BLOCK]
    mini.check()


def test_a_short_load_behind_a_parked_one_of_its_step_keeps_nobody_waiting() -> None:
    """It crosses the bus behind that one, for which running requests would wait as well."""
    mini = Mini(blocks=129, load_mode="auto", max_stall_ms=30)
    long, short = prompt(60, seed=1), prompt(10, seed=2)
    mini.only_in_cpu(long, short)
    mini.add(prompt(1, seed=3), count=20)
    mini.step()
    hits = [mini.add(long), mini.add(short)]
    mini.step()
    assert [mini.scheduler.requests[name].status.name for name in hits] == [
        "WAITING_FOR_REMOTE_KVS"
    ] * 2
    mini.run()
    assert [mini.hits[name] for name in hits] == [60 * BLOCK, 10 * BLOCK]
    mini.check()


def test_one_that_waits_for_anothers_load_and_has_no_room_keeps_its_hit() -> None:
    mini = Mini(load_mode="parked", late=3)
    mini.only_in_cpu(prompt(6, seed=1))
    other = mini.add(prompt(2, seed=2), count=20)
    mini.step()
    hit = mini.add(prompt(6, seed=1, tail=8 * BLOCK + 1))
    longer = mini.add([*prompt(6, seed=1)[: 6 * BLOCK], *prompt(7, seed=5)])
    mini.step()
    assert names(mini.scheduler.running) == [other]
    assert mini.scheduler.requests[longer].status == RequestStatus.WAITING
    mini.run()
    assert mini.hits[hit] == mini.hits[longer] == 6 * BLOCK
    mini.check()


def test_nor_does_it_lose_its_hit_if_nobody_is_parked_for_that_load_any_more() -> None:
    mini = Mini(load_mode="parked", late=5)
    mini.only_in_cpu(prompt(6, seed=1))
    mini.add(prompt(2, seed=2), count=20)
    mini.step()
    began = mini.add(prompt(6, seed=1))
    mini.step()
    mini.abort(began)
    tight = Tight(mini, 12)
    waits = mini.add([*prompt(6, seed=1)[: 6 * BLOCK], *prompt(5, seed=3)])
    mini.step()
    assert mini.tier._loads.under_way and waits not in mini.hits
    tight.blocks = 0
    mini.run()
    mini.check()
    assert mini.hits[waits] == 6 * BLOCK and mini.manager.stats.loaded == 6


def test_what_is_hit_on_the_gpu_is_not_given_to_those_before_it() -> None:
    mini = Mini(blocks=25)
    for seed in (1, 2, 3):  # 7 blocks each, so the next one takes 3 that are new and 6 of the first
        mini.add(prompt(6, seed=seed))
        mini.run()
    new, hit = mini.add(prompt(8, seed=4)), mini.add(prompt(6, seed=1))
    mini.begin_step()
    assert mini.hits == {**mini.hits, new: 0, hit: 6 * BLOCK}
    mini.run()
    mini.check()


@pytest.mark.parametrize(("missing", "at_once"), [(9, True), (12, False)])
def test_nor_is_what_one_hits_that_vllm_alone_may_find_room_for(
    missing: int, at_once: bool
) -> None:
    """It is held where that leaves those before it their room, and else it waits for their step."""
    mini = Mini(blocks=25)
    for seed in (1, 2, 3):
        mini.add(prompt(6, seed=seed))
        mini.run()
    tight = Tight(mini, missing)
    new, hit = mini.add(prompt(8, seed=4)), mini.add(prompt(6, seed=1))
    mini.step()
    assert names(mini.scheduler.running) == [new, hit][: 1 + at_once]
    tight.blocks = 0
    mini.run()
    mini.check()
    assert mini.hits == {**mini.hits, new: 0, hit: 6 * BLOCK}
    assert mini.manager.stats.loaded == (0 if at_once else 3), "what the one before was given"
    nothing_held(mini)


def test_however_many_hit_the_gpu_a_step_looks_at_each_free_block_once() -> None:
    mini, looked = Mini(blocks=400), []
    mini.add(prompt(6, seed=1))
    mini.run()
    free_after = mini.view.free_after

    def look(block: Any, count: int) -> list[Any]:
        looked.append(free_after(block, count))
        return list(looked[-1])

    mini.view.free_after = look
    hits = [mini.add([*prompt(6, seed=1)[: 6 * BLOCK], *prompt(1, seed=n)]) for n in range(2, 8)]
    mini.begin_step()
    assert [mini.hits[name] for name in hits] == 6 * [6 * BLOCK]
    assert list(map(len, looked))[:5] == 5 * [8], "what the one before is given"


@pytest.mark.parametrize(("blocks", "asked"), [(25, [8, 2]), (17, [1, 1])])
def test_running_requests_that_need_no_block_leave_all_of_them_to_those_that_wait(
    blocks: int, asked: list[int]
) -> None:
    """As in vLLM: each takes one in one of its steps, and none in this."""
    mini = Mini(blocks=blocks)
    running = [mini.add(prompt(2, seed=seed), count=9) for seed in range(4)]
    mini.step()
    assert mini.pool.get_num_free_blocks() == sum(asked) + len(asked)
    waiting = [mini.add(prompt(n, seed=5 + at)) for at, n in enumerate(asked)]
    mini.step()
    assert names(mini.scheduler.running) == [*running, *waiting]


def test_one_without_a_hit_leaves_running_and_parked_requests_their_room() -> None:
    """VLLM, which knows nothing of the parked one's, would admit it beside the running one."""
    mini = Mini(blocks=41, load_mode="parked", late=3)
    mini.only_in_cpu(prompt(4, seed=1))
    running = mini.add(prompt(20, seed=2), count=30)
    hit = mini.add(prompt(4, seed=1, tail=6 * BLOCK))
    mini.step()
    assert mini.pool.get_num_free_blocks() == 20, "5 of them are the running one's, 7 the hit's"
    mini.add(prompt(10, seed=3))
    mini.step()
    assert names(mini.scheduler.running) == [running]
    mini.run()
    mini.check()
    assert list(mini.hits)[2] == hit


def test_a_long_prompt_needs_room_for_what_its_first_step_computes_if_vllm_asks_no_more() -> None:
    """Room for all of it would have it wait for others, whom vLLM runs it beside."""
    mini = Mini(blocks=41, load_mode="inline")
    mini.scheduler.scheduler_reserve_full_isl = False
    mini.only_in_cpu(prompt(2, seed=1))
    running = mini.add(prompt(13, seed=2), count=9)
    mini.step()
    long = mini.add([*prompt(2, seed=1)[: 2 * BLOCK], *prompt(28, seed=3)], count=1)
    mini.step()
    assert names(mini.scheduler.running) == [running, long] and mini.hits[long] == 2 * BLOCK
    mini.run()
    mini.check()


@pytest.mark.parametrize("load_mode", ["inline", "parked"])
def test_nothing_is_loaded_for_a_long_prompt_until_vllm_has_room_for_all_of_it(
    load_mode: str,
) -> None:
    mini = Mini(blocks=61, load_mode=load_mode)
    if not getattr(mini.scheduler, "scheduler_reserve_full_isl", False):
        pytest.skip("this release asks for the room of a first step alone")
    mini.only_in_cpu(prompt(4, seed=1))
    running = mini.add(prompt(20, seed=2), count=9)
    mini.step()
    mini.step()
    hit = mini.add([*prompt(4, seed=1)[: 4 * BLOCK], *prompt(40, seed=3)])
    while running in mini.scheduler.requests:
        assert mini.manager.stats.loaded == 0 and hit not in mini.hits
        mini.step()
    mini.run()
    mini.check()
    assert mini.hits[hit] == 4 * BLOCK


def test_a_long_prompt_takes_in_none_of_its_steps_what_a_parked_request_needs() -> None:
    """It waits for room for all of it, also if vLLM asks for that of its first step alone."""
    mini = Mini(blocks=41, load_mode="parked", late=3)
    mini.scheduler.scheduler_reserve_full_isl = False
    mini.only_in_cpu(prompt(4, seed=1))
    hit = mini.add(prompt(4, seed=1, tail=6 * BLOCK), count=30)
    long = mini.add(prompt(33, seed=2))
    mini.run()
    mini.check()
    assert list(mini.hits)[1:] == [hit, long] and mini.hits[hit] == 4 * BLOCK


def test_a_request_without_a_hit_is_admitted_if_vllm_finds_room() -> None:
    mini = Mini()
    tight = Tight(mini, 18)
    running = mini.add(prompt(2, seed=2), count=20)
    mini.step()
    fresh, behind = mini.add(prompt(6, seed=1)), mini.add(prompt(1, seed=3))
    mini.step()
    assert names(mini.scheduler.running) == [running, fresh], "that one, and none unseen"
    tight.blocks = 0
    mini.step()
    assert names(mini.scheduler.running) == [running, fresh, behind]


def test_one_that_waits_is_looked_up_again_once_others_have_computed_what_it_lacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind that the tier has more, without which vLLM would admit it if it found room."""
    mini = Mini(blocks=49, late=3)
    tokens = prompt(8, seed=1)
    mini.only_in_cpu(tokens)
    for key in list(mini.manager._slot_of)[:2]:
        mini.manager.discard(key)
    mini.add([*tokens[: 2 * BLOCK], *prompt(14, seed=2)], count=2)  # more than a step takes
    waits = mini.add(tokens)
    fits, room = AdmissionBudget.fits, {"more": False}

    def counted(self: AdmissionBudget, request: Any, *args: Any) -> bool:
        return (request.request_id != waits or room["more"]) and fits(self, request, *args)

    monkeypatch.setattr(AdmissionBudget, "fits", counted)
    for _ in range(2):
        mini.step()
        assert waits not in mini.hits
    room["more"] = True
    mini.run()
    mini.check()
    assert mini.hits[waits] == 8 * BLOCK


def test_what_comes_to_the_gpu_while_one_waits_is_no_hit_of_the_tier() -> None:
    mini = Mini(load_mode="inline", policy="priority")
    mini.only_in_cpu(prompt(6, seed=1))
    tight = Tight(mini, 15)
    mini.add(prompt(2, seed=2), count=20)
    mini.step()
    waits = mini.add(prompt(6, seed=1), priority=2)
    mini.step()
    assert waits not in mini.hits
    tight.blocks = 0
    first = mini.add(prompt(6, seed=1), priority=1)
    mini.run()
    mini.check()
    assert mini.hits[first] == mini.hits[waits] == 6 * BLOCK
    assert mini.tier.counts().hit == 6 * BLOCK, "that of the first alone"


def test_one_that_waits_uses_what_it_hits_once() -> None:
    """Or else what is stored from the third use on would be stored after the second."""
    mini = Mini(store="eager", store_min_uses=3)
    mini.add(prompt(6, seed=1), count=1)
    mini.run()
    running = mini.add(prompt(10, seed=2), count=60)
    mini.step()
    waits = mini.add(prompt(6, seed=1) + prompt(8, seed=3), count=1)
    for _ in range(3):
        mini.step()
        assert waits not in mini.hits
    mini.abort(running)
    mini.run()
    mini.add(prompt(1, seed=4), count=1)
    mini.run()
    assert mini.hits[waits] == 6 * BLOCK and mini.manager.stats.stored == 0


# The limit


@pytest.mark.parametrize("raises", [False, True])
def test_the_limit_is_back_when_schedule_is_over(raises: bool) -> None:
    mini = Mini()
    mini.only_in_cpu(prompt(6, seed=1))
    Tight(mini, 20)
    mini.add(prompt(2, seed=2), count=20)
    mini.step()
    mini.add(prompt(6, seed=1))
    manager, within = mini.scheduler.kv_cache_manager, []
    allocate = manager.allocate_slots

    def allocate_slots(*args: Any, **kwargs: Any) -> Any:
        within.append(limit(mini))
        if raises:
            raise MemoryError("no more")
        return allocate(*args, **kwargs)

    manager.allocate_slots = allocate_slots
    if raises:
        with pytest.raises(MemoryError, match="no more"):
            mini.step()
    else:
        mini.step()
    assert within == [1] and limit(mini) == 8


@pytest.mark.parametrize("sessions", [0, 2])
def test_sessions_that_wait_for_input_keep_their_slots(sessions: int) -> None:
    mini = Mini()
    mini.only_in_cpu(prompt(6, seed=1))
    running = mini.add(prompt(2, seed=2), count=20)
    mini.step()
    Tight(mini, 16)
    mini.scheduler.num_waiting_for_streaming_input = sessions
    small, hit, behind = (mini.add(prompt(n, seed=s)) for n, s in ((1, 3), (6, 1), (1, 4)))
    mini.step()
    assert names(mini.scheduler.running) == [running, small]
    assert hit not in mini.hits and behind not in mini.hits
    mini.scheduler.num_waiting_for_streaming_input = 0
    mini.run()
    mini.check()


def test_a_session_that_goes_on_is_admitted_past_the_cap() -> None:
    mini = Mini()
    mini.only_in_cpu(prompt(6, seed=1))
    Tight(mini, 14)
    running, session = (mini.add(prompt(2, seed=seed), count=20) for seed in (2, 3))
    mini.step()
    request = mini.scheduler.running.pop()
    request.status = RequestStatus.WAITING  # it holds its blocks, as one does that has new input
    mini.view._queues[0].add_request(request)
    hit, behind = mini.add(prompt(6, seed=1)), mini.add(prompt(1, seed=4))
    mini.step()
    assert names(mini.scheduler.running) == [running, session]
    assert hit not in mini.hits and behind not in mini.hits


def test_many_that_something_else_blocks_do_not_block_those_behind() -> None:
    mini = Mini()
    running = mini.add(prompt(2, seed=2), count=20)
    mini.step()
    for _ in range(80):
        name = mini.add(prompt(1, seed=4))
        mini.scheduler.requests[name].status = RequestStatus.WAITING_FOR_REMOTE_KVS
    fresh = mini.add(prompt(1, seed=3))
    mini.step()
    assert names(mini.scheduler.running) == [running, fresh]


# Leaving


@pytest.mark.parametrize("event", ["abort", "reset", "abort all"])
def test_requests_come_to_an_end_whatever_happens_while_admissions_are_capped(event: str) -> None:
    mini = Mini(load_mode="parked", late=2)
    mini.only_in_cpu(prompt(6, seed=1), prompt(14, seed=2))
    mini.add(prompt(2, seed=3), count=20)
    mini.step()
    mini.add(prompt(6, seed=1))
    waits, behind = mini.add(prompt(14, seed=2)), mini.add(prompt(1, seed=4))
    mini.step()
    assert len(mini.scheduler.running) == 1
    assert mini.scheduler.requests[waits].status == RequestStatus.WAITING
    if event == "reset":
        mini.scheduler.reset_prefix_cache()
    else:
        mini.abort(*([waits] if event == "abort" else []))
    last = mini.add(prompt(2, seed=5))
    mini.run(steps=100)
    mini.check()
    assert (waits in mini.hits) == (event == "reset")
    assert (behind in mini.hits) == (event != "abort all") and last in mini.hits
    assert limit(mini) == 8


# Running prompts


@pytest.mark.parametrize("load_mode", ["inline", "auto"])
@pytest.mark.parametrize("copies_overlap", [True, False])
def test_nothing_is_loaded_inline_for_a_step_whose_tokens_running_prompts_take(
    load_mode: str, copies_overlap: bool
) -> None:
    mini = Mini(load_mode=load_mode, blocks=101, ranks=FakeRanks(0.5, copies_overlap))
    mini.only_in_cpu(prompt(10, seed=1))
    mini.add(prompt(70, seed=2), count=3)  # in five steps
    mini.step()
    hit = mini.add(prompt(10, seed=1), count=3)
    run_with_readers(mini, hit)
    assert mini.hits[hit] == 10 * BLOCK


@pytest.mark.parametrize("load_mode", ["inline", "auto"])
@pytest.mark.parametrize("split", [True, False])
def test_the_last_tokens_of_a_step_are_enough_for_a_hit(split: bool, load_mode: str) -> None:
    """One where a prompt may be split, and else as many as it has left to compute."""
    mini = Mini(load_mode=load_mode, blocks=101, limits={"enable_chunked_prefill": split})
    mini.only_in_cpu(prompt(4, seed=1))
    tail = 1 if split else 6
    mini.add(prompt(0, seed=2, tail=256 - tail), count=1)
    hit = mini.add(prompt(4, seed=1, tail=6), count=1)
    scheduled = mini.begin_step()
    assert scheduled.num_scheduled_tokens.get(hit) == tail
    assert mini.hits[hit] == 4 * BLOCK
    mini.end_step()
    mini.run()
    mini.check()


@pytest.mark.parametrize("load_mode", ["inline", "auto"])
def test_a_prompt_that_may_not_be_split_is_loaded_for_the_step_that_has_tokens_for_all_of_it(
    load_mode: str,
) -> None:
    mini = Mini(load_mode=load_mode, blocks=101, limits={"enable_chunked_prefill": False})
    mini.only_in_cpu(prompt(10, seed=1))
    mini.add(prompt(15, seed=2), count=3)  # 241 of a step's 256 tokens
    hit = mini.add(prompt(10, seed=1, tail=20), count=3)
    run_with_readers(mini, hit)
    assert mini.hits[hit] == 10 * BLOCK


def run_with_readers(mini: Mini, name: str) -> None:
    """Run to the end; what is loaded inline is read in that step."""
    while mini.scheduler.has_unfinished_requests():
        planned = len(mini.plans)
        scheduled = mini.begin_step()
        mini.end_step()
        if any(plan.waits_for(LOAD) and plan.before for plan in mini.plans[planned:]):
            assert scheduled.num_scheduled_tokens.get(name), "nobody reads it in this step"
    mini.check()
    nothing_held(mini)


def test_a_load_leaves_running_prompts_their_blocks() -> None:
    running_prompt()


def test_a_prompt_that_is_computed_again_is_reckoned_as_one_under_way() -> None:
    """It takes what a prompt takes in a step; of a decode that is a block at most."""
    mini = Mini(blocks=61)
    name = mini.add(prompt(30, seed=1), count=9)
    while not mini.answers[name]:
        mini.step()
    assert mini.scheduler.reset_prefix_cache(reset_running_requests=True)
    mini.step()
    (_, blocks), free = mini.view.demand_of_running(), mini.pool.get_num_free_blocks()
    mini.step()
    assert 1 < free - mini.pool.get_num_free_blocks() <= blocks
    mini.run()
    mini.check()


@pytest.mark.parametrize("running", [True, False])
def test_a_load_leaves_vllm_its_watermark(running: bool) -> None:
    """Without room beside the watermark vLLM would not admit whom it is for."""
    mini = Mini(load_mode="inline", blocks=41, limits={"watermark": 0.5})  # 20 blocks
    mini.only_in_cpu(prompt(12, seed=1))
    mini.add(prompt(9, seed=2), count=20)
    if running:
        mini.step()
    hit = mini.add(prompt(12, seed=1))
    scheduled = mini.begin_step()
    assert hit not in scheduled.num_scheduled_tokens
    assert not any(plan.before for plan in mini.plans), "a load without a reader"
    mini.end_step()
    mini.run()
    mini.check()
    nothing_held(mini)
    assert mini.hits[hit] == 12 * BLOCK, "when the other one was done"


def test_one_that_begins_where_nothing_runs_needs_no_room_beside_the_watermark() -> None:
    """Where the tier asked for it, vLLM would admit it without its hit."""
    mini = Mini(load_mode="inline", blocks=41, limits={"watermark": 0.5})  # 20 blocks
    mini.only_in_cpu(prompt(24, seed=1))
    hit = mini.add(prompt(24, seed=1))
    mini.run()
    mini.check()
    assert mini.hits[hit] == 24 * BLOCK


def test_vllm_keeps_its_watermark_once_however_many_it_admits() -> None:
    mini = Mini(load_mode="inline", blocks=41, limits={"watermark": 0.5})  # 20 blocks
    asked = [mini.add(prompt(3, seed=seed)) for seed in range(5)]
    mini.step()
    assert names(mini.scheduler.running) == asked


def test_a_prompt_may_be_split_by_a_threshold() -> None:
    """As vLLM does with long prompts, and only so many tokens of a step are taken."""
    mini = Mini(load_mode="inline", blocks=101, limits={"long_prefill_token_threshold": 40})
    mini.only_in_cpu(prompt(4, seed=1))
    long = mini.add(prompt(70, seed=2), count=3)
    mini.step()
    hit = mini.add(prompt(4, seed=1), count=3)
    scheduled = mini.begin_step()
    assert scheduled.num_scheduled_tokens == {long: 40, hit: 1}
    assert mini.hits[hit] == 4 * BLOCK
    mini.end_step()
    mini.run()
    mini.check()
    nothing_held(mini)


# Many steps under way, as with pipeline stages


@pytest.mark.parametrize("seed", [8, 11, 26, 43])
@pytest.mark.parametrize("load_mode", ["auto", "parked"])
@pytest.mark.parametrize("in_flight", [3, 6])
def test_requests_leave_nothing_behind_however_many_steps_are_under_way(
    in_flight: int, load_mode: str, seed: int
) -> None:
    """One that was preempted can end by a step that had begun before."""
    mini = Mini(in_flight=in_flight, load_mode=load_mode, late=seed % 4, blocks=25)
    rng = random.Random(seed)
    known = [prompt(rng.randrange(1, 6), seed=s + 1000 * seed) for s in range(8)]
    mini.only_in_cpu(*known)
    for s in range(12):
        own = prompt(0, seed=s, tail=rng.randrange(1, 12))
        mini.add(known[s % 8] + own, count=rng.randrange(8, 60))
        for _ in range(rng.randrange(3)):
            mini.step()
    mini.run()
    mini.check()
    nothing_held(mini)
    assert mini.device.resumed


# The bus


def many_hits(mini: Mini, count: int) -> list[str]:
    """Requests that wait, four blocks each that only the tier has, and one without a hit."""
    prompts = [prompt(4, seed=seed) for seed in range(1, count + 1)]
    mini.only_in_cpu(*prompts)
    return [*(mini.add(p) for p in prompts), mini.add(prompt(1, seed=99))]


@pytest.mark.parametrize("load_mode", ["auto", "parked"])
def test_loads_are_begun_only_as_far_as_the_bus_comes_soon(load_mode: str) -> None:
    mini = Mini(blocks=120, late=1, load_mode=load_mode, ranks=FakeRanks(BUS_MS / 8 + 1))
    *hits, fresh = many_hits(mini, 7)
    planned = len(mini.plans)
    mini.step()
    inline = load_mode == "auto"  # the first load, as nothing runs
    assert len(mini.plans[planned].before) == 2 + inline, "8 blocks are just more than enough"
    assert fresh in mini.hits, "it needs no load"
    while hits[-1] not in mini.hits:
        mini.step()
        assert mini.tier._loads.blocks_under_way <= 12
    mini.run()
    assert [mini.hits[name] for name in hits] == [4 * BLOCK] * 7
    assert [name for name in mini.hits if name in hits] == hits, "each in its turn"
    mini.check()


def test_those_behind_one_that_waits_for_the_bus_do_not_wait() -> None:
    behind_the_bus()


def test_one_behind_a_load_that_waits_for_stores_does_not_wait() -> None:
    behind_stores()


def test_one_that_waits_for_the_bus_keeps_its_room_by_its_priority() -> None:
    priority_behind_the_bus()


def test_the_bus_is_no_limit_where_copies_do_not_run_beside_compute() -> None:
    mini = Mini(blocks=120, load_mode="auto", ranks=FakeRanks(10 * BUS_MS, copies_overlap=False))
    names_of = many_hits(mini, 7)
    mini.begin_step()
    assert names(mini.scheduler.running) == names_of
    assert len(mini.plans[-1].before) == 7


# All of it


def last_lookups(mini: Mini) -> dict[str, int]:
    """Tokens that each request's last lookup found on the GPU."""
    pool, found_on_gpu = mini.tier._admission._pool, {}
    look_up = pool.look_up

    def noted(request: Any, **more: Any) -> Any:
        found = look_up(request, **more)
        found_on_gpu[request.request_id] = 0 if found.arriving else found.gpu_tokens
        return found

    pool.look_up = noted
    return found_on_gpu


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("load_mode", ["inline", "auto", "parked"])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_every_request_hits_what_it_could_and_comes_to_its_end(
    in_flight: int, load_mode: str, seed: int
) -> None:
    rng = random.Random(seed)
    mini = Mini(
        in_flight=in_flight,
        late=rng.randrange(4),
        blocks=rng.choice([25, 40]),
        num_slots=2000,
        ranks=FakeRanks(rng.choice([0.1, 1.0, 15.0, 60.0])),
        load_mode=load_mode,
    )
    known = [prompt(rng.randrange(1, 12), seed=1000 + n, tail=1) for n in range(10)]
    mini.only_in_cpu(*known)
    could: dict[str, int] = {}
    on_gpu = last_lookups(mini)
    for _ in range(60):
        n = rng.randrange(15)
        asked = known[n] if n < 10 else prompt(rng.randrange(6), seed=rng.randrange(10**6))
        own = prompt(0, seed=rng.randrange(10**6), tail=rng.choice([1, 40]))
        name = mini.add(asked + own, count=rng.randrange(1, 6))
        could[name] = (len(asked) - 1) // BLOCK * BLOCK if n < 10 else 0
        for _ in range(rng.choice([0, 0, 1, 3])):
            if mini.queue or mini.scheduler.has_requests():
                mini.step()
    mini.run(steps=1000)
    mini.check()
    # What it had on the GPU alone, one before it may have evicted in that very step.
    lost = [name for name, hit in could.items() if mini.hits[name] < hit]
    assert [name for name in lost if on_gpu.get(name, 0) < could[name]] == []
    assert mini.manager.stats.loaded > 60


@pytest.mark.parametrize("fails", [False, True])
def test_a_request_whose_blocks_have_arrived_is_not_held_up_by_one_behind_it(fails: bool) -> None:
    """That one hits much, and has no room. What has failed to arrive counts as nothing computed."""
    mini = Mini(blocks=41, load_mode="inline", step_ms=1.0)
    big, sent = prompt(20, seed=7), prompt(12, seed=3)
    mini.only_in_cpu(big)
    connector = Connector(mini, True, sent[: 12 * BLOCK])
    mini.add(prompt(1, seed=1), count=200)
    mini.step()
    mini.step()
    name = mini.add(sent)
    mini.step()
    assert mini.scheduler.requests[name].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    mini.add([*big, *[5] * (8 * BLOCK)])
    connector.fill(name)
    if fails:
        mini.scheduler.requests[name].num_computed_tokens = 0
        mini.scheduler.failed_recving_kv_req_ids.add(name)
        connector.known.clear()
    mini.scheduler.finished_recving_kv_req_ids.add(name)
    steps = 0
    while not mini.answers[name]:
        mini.step()
        steps += 1
    assert steps < 5


@pytest.mark.parametrize("load_mode", ["inline", "parked"])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_one_behind_does_not_take_the_room_of_a_request_whose_blocks_have_arrived(
    policy: str, load_mode: str
) -> None:
    """It would fit alone. vLLM, which admits in order, has room for neither then."""
    took = []
    for count in (0, 1):
        mini = Mini(blocks=30, load_mode=load_mode, policy=policy)
        behind, sent = prompt(10, seed=7), prompt(19, seed=3)
        mini.only_in_cpu(behind)
        connector = Connector(mini, True, sent[: 8 * BLOCK])
        name = mini.add(sent)
        mini.step()
        assert mini.scheduler.requests[name].status == RequestStatus.WAITING_FOR_REMOTE_KVS
        connector.fill(name)
        mini.scheduler.finished_recving_kv_req_ids.add(name)
        for _ in range(count):
            mini.add(behind)
        took.append(0)
        while not mini.answers[name]:
            mini.step()
            took[-1] += 1
        mini.run(steps=50)
        mini.check()
    assert took[0] == took[1] < 5


def test_one_whose_blocks_have_arrived_takes_room_for_the_rest_alone() -> None:
    """One behind it that just fits beside it is admitted with it, and hits what it can."""
    mini = Mini(blocks=30, load_mode="inline")
    known, sent = prompt(8, seed=7), prompt(19, seed=3)
    mini.only_in_cpu(known)
    connector = Connector(mini, True, sent[: 8 * BLOCK])
    name = mini.add(sent)
    mini.step()
    connector.fill(name)
    mini.scheduler.finished_recving_kv_req_ids.add(name)
    hit = mini.add(known)
    while name not in mini.hits:
        mini.step()
    assert mini.hits.get(hit) == 8 * BLOCK
    mini.run(steps=50)
    mini.check()


@pytest.mark.parametrize(("own", "room"), [(3 * BLOCK + 1, 4), (1, 1), (0, 1)])
def test_a_parked_request_keeps_room_for_what_it_computes_beside_one_that_has_its_prefix(
    own: int, room: int
) -> None:
    """Also where it fits, or leaves the other a block, only as it takes none for that prefix."""
    mini = Mini(blocks=30, load_mode="parked")
    known, behind = prompt(12, seed=1, tail=0), prompt(4, seed=2, tail=0)
    mini.only_in_cpu([*known, *behind, 3])
    mini.add([*known, 4], count=40)
    while not mini.scheduler.running:
        mini.step()
    mini.settle()
    mini.add([*known, *behind, *prompt(0, seed=5, tail=own)], count=1)
    mini.begin_step()
    assert mini.tier._loads.reserved() == (1, room), "blocks of its own"
    mini.run()
    mini.check()


def test_slots_of_drafted_tokens_are_counted_as_vllm_does() -> None:
    """A prompt ends 4 tokens before its block does; with 5 to be drafted it needs another."""
    mini = Mini(lookahead=5)
    name = mini.add(prompt(3, 1, tail=12), 2)
    budget = AdmissionBudget(mini.view)
    assert budget.fits(mini.scheduler.requests[name], 0, ())
    assert budget.needed == 5
    free = mini.pool.get_num_free_blocks()
    mini.step()
    assert free - mini.pool.get_num_free_blocks() == budget.needed


def needs_more(mini: Mini, name: str, blocks: int) -> None:
    """vLLM asks for more blocks for a request than anybody can know."""
    coordinator = mini.kv_manager.coordinator
    count = coordinator.get_num_blocks_to_allocate

    def needs(*args: Any, **kwargs: Any) -> int:
        request_id = kwargs.get("request_id") or args[0]
        return int(count(*args, **kwargs)) + blocks * (request_id == name)

    coordinator.get_num_blocks_to_allocate = needs


def test_what_is_held_for_those_that_wait_does_not_keep_the_first_one_out_for_ever() -> None:
    """Whatever vLLM needs for it that nobody has counted."""
    mini = Mini(blocks=25)
    first, second = prompt(16, 1), prompt(6, 2)
    for asked in (second, first):
        mini.add(asked, 1)
        mini.run()
    needs_more(mini, mini.add(first + prompt(1, 3), 2), 2)
    mini.add(second + prompt(9, 4), 2)
    mini.run(steps=200)
    mini.check()
    nothing_held(mini)
