"""Requests that come while the engine waits for a step: their loads begin before vLLM has them."""

from __future__ import annotations

import queue
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from integration.engine.mini import FakeRanks, Mini
from scheduler_half.scenarios import nothing_held, prompt

from kvoffload_patch.integration.engine import arrivals
from kvoffload_patch.integration.engine.arrivals import Arrivals

ADD, OTHER = object(), object()


class Told:
    """In the place of the breaker: what was told, and what happens then."""

    def __init__(self) -> None:
        self.names = list[str]()
        self.then: Callable[[], None] = lambda: None

    def look_ahead(self, requests: list[str]) -> None:
        self.names += requests
        self.then()


def over_after(times: int) -> Callable[[], bool]:
    left = iter(range(times))
    return lambda: next(left, None) is None


def test_each_request_in_the_queue_is_told_once_and_left_there() -> None:
    waiting: queue.Queue[Any] = queue.Queue()
    waiting.put((ADD, ("first", 0)))
    waiting.put((OTHER, "no request"))
    told = Told()
    told.then = lambda: waiting.put((ADD, ("second", 0))) if len(told.names) == 1 else None
    Arrivals(waiting, ADD, told).watch(over_after(10))  # type: ignore[arg-type]
    assert told.names == ["first", "second"]
    assert waiting.qsize() == 3


def test_a_step_that_is_over_is_not_waited_for() -> None:
    waiting: queue.Queue[Any] = queue.Queue()
    waiting.put((ADD, ("first", 0)))
    told = Told()
    Arrivals(waiting, ADD, told).watch(lambda: True)  # type: ignore[arg-type]
    assert told.names == []


def test_an_engine_in_the_process_of_its_user_has_nothing_to_watch() -> None:
    asked = list[Any]()
    ranks: Any = SimpleNamespace(while_waiting=asked.append)
    told: Any = Told()
    arrivals.watch(SimpleNamespace(), told, ranks)
    assert asked == []
    arrivals.watch(SimpleNamespace(input_queue=queue.Queue()), told, ranks)
    assert len(asked) == 1


class Served(Mini):
    """One long answer runs; the tier has more than the GPU."""

    def __init__(self, *prompts: list[int], **more: Any) -> None:
        about: dict[str, Any] = {"in_flight": 2, "blocks": 49, "late": 1, "step_ms": 5}
        super().__init__(**{**about, **more})
        self.only_in_cpu(*prompts)
        self.running = self.add(prompt(1, seed=99), count=60)
        for _ in range(4):
            self.step()

    @property
    def ahead(self) -> list[str]:
        return list(self.tier._loads._ahead)


@pytest.fixture
def asked() -> list[int]:
    return prompt(6, seed=1)


def loads_of(mini: Mini, name: str) -> int:
    """Loads that are planned, and those sent between steps, of blocks that a request waits for."""
    return sum(p.request is not None and p.request.request_id == name
               for load in mini.tier._loads._under_way for p in load.waiting)  # fmt: skip


def test_the_load_is_begun_while_the_step_runs_and_the_request_waits_for_it(
    asked: list[int],
) -> None:
    mini = Served(asked, ranks=FakeRanks(15.0))
    name = mini.come(asked, count=3)
    mini.step()
    assert mini.ahead == [name]
    assert mini.device._queues[("cpu", "gpu")]._queued, "the rank has it"
    mini.step()  # it is given to the scheduler, and parked
    assert mini.ahead == [] and mini.tier._loads.is_parked(name)
    assert loads_of(mini, name) == 1
    mini.run()
    assert mini.hits[name] == 96
    assert mini.manager.stats.loaded == 6, "no block was loaded twice"
    mini.check()
    nothing_held(mini)


def test_a_short_load_is_joined_by_the_step_that_is_first_given_the_request(
    asked: list[int],
) -> None:
    mini = Served(asked, ranks=FakeRanks(0.1))
    name = mini.come(asked, count=3)
    mini.step()
    mini.step()
    assert mini.hits[name] == 96
    assert mini.tier._report.hit == 96, "it counts as a hit of the tier"
    mini.run()
    mini.check()
    nothing_held(mini)


def test_a_request_that_is_never_given_leaves_its_blocks_in_the_cache(asked: list[int]) -> None:
    mini = Served(asked, ranks=FakeRanks(15.0))
    name = mini.come(asked, count=3)
    mini.step()
    assert mini.ahead == [name]
    mini.abort(name)
    assert mini.ahead == []
    mini.run()
    later = mini.add(asked, count=2)
    mini.run()
    assert mini.hits[later] == 96 and mini.manager.stats.loaded == 6
    nothing_held(mini)


def test_one_that_is_dropped_without_a_word_is_forgotten_with_its_load(asked: list[int]) -> None:
    """As vLLM does with requests that it refuses while it shuts down."""
    mini = Served(asked, ranks=FakeRanks(15.0))
    name = mini.come(asked)
    mini.step()
    assert mini.ahead == [name]
    mini.counts[name] = 0
    mini.coming.clear()
    mini.seen = 0
    mini.run()
    nothing_held(mini)


def test_nothing_is_begun_once_blocks_were_given_back(asked: list[int]) -> None:
    """A step under way may still write to what a request that has ended gave back."""
    mini = Served(asked, ranks=FakeRanks(15.0))
    mini.come(asked)
    mini.begin_step()
    mini.end_step()
    assert mini.queue, "another step is under way"
    mini.look_ahead()
    assert mini.ahead == []
    mini.begin_step()
    mini.abort("nobody")
    mini.look_ahead()
    assert mini.ahead == []


@pytest.mark.parametrize("why", ["another waits", "paused", "inline", "no room"])
def test_nothing_is_begun_where_another_would_be_held_up(asked: list[int], why: str) -> None:
    mini = Served(asked, ranks=FakeRanks(15.0), load_mode="inline" if why == "inline" else "auto")
    mini.begin_step()
    if why == "another waits":
        mini.add(prompt(2, seed=5))
    if why == "paused":
        mini.tier.pause()
    if why == "no room":
        mini.pool.get_new_blocks(mini.pool.get_num_free_blocks() - 2)
    mini.come(asked)
    mini.look_ahead()
    assert mini.ahead == []


def test_nothing_is_begun_beside_a_connector(
    asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives blocks back when it likes."""
    mini = Served(asked, ranks=FakeRanks(15.0))
    after_schedule = mini.tier.after_schedule

    def beside_one(output: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(mini.scheduler, "connector", object())
            patch.setattr(mini.tier._invalid, "step_scheduled", lambda *args: None)
            after_schedule(output)

    monkeypatch.setattr(mini.tier, "after_schedule", beside_one)
    mini.come(asked)
    mini.step()
    assert mini.ahead == []


def test_a_load_that_fails_is_looked_up_again(asked: list[int]) -> None:
    mini = Served(asked, ranks=FakeRanks(15.0), fails=lambda link, ticket: link == "load")
    name = mini.come(asked, count=3)
    mini.step()
    assert mini.ahead == [name]
    mini.run()
    assert mini.hits[name] == 0
    mini.check()
    nothing_held(mini)


def test_what_raises_detaches_the_tier_before_the_output_is_taken_in(
    asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    mini = Served(asked)

    def broken(plan: Any) -> None:
        raise RuntimeError("no stream")

    monkeypatch.setattr(mini.ranks, "load_ahead", broken)
    mini.come(asked, count=3)
    mini.step()
    assert mini.breaker.detached
    assert mini.breaker.failure == "look_ahead: RuntimeError: no stream"
    mini.run()
    mini.check()
