"""Loads begun beside steps: vLLM's own scheduler, and a device that copies as late as it may."""

from __future__ import annotations

from collections.abc import Callable
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from integration.engine.mini import Mini
from integration.engine.world import prompt
from scheduler_half.device import LOAD

from kvoffload_patch.integration.protocol import TIER
from scripts.bench.probes.early import EarlyLoads

# What an engine core's input queue has, for each request.
ADD, ABORT = SimpleNamespace(name="ADD"), SimpleNamespace(name="ABORT")


class Rank:
    """As a rank's copy engine: a plan goes to the device without a step."""

    def __init__(self, mini: Mini) -> None:
        self._device, self._plan = mini.device, None

    def begin_step(self, plan: Any) -> None:
        self._device._begin(plan)
        self._plan = plan

    def end_step(self) -> None:
        assert self._plan is not None
        for store in self._plan.after:
            self._device._submit(store, self._plan, behind=LOAD)


class Core:
    """An engine core whose requests lie in its input queue until a step has ended."""

    def __init__(self, mini: Mini) -> None:
        self.input_queue = Queue[Any]()
        self.scheduler = mini.scheduler
        runner = SimpleNamespace(**{TIER: SimpleNamespace(_engine=Rank(mini))})
        worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
        self.model_executor = SimpleNamespace(driver_worker=worker)

    def _handle_client_request(self, kind: Any, add: Callable[[], object]) -> None:
        assert kind is ADD
        add()


@pytest.fixture
def mini() -> Mini:
    """An engine whose CPU tier has a prompt that its GPU has lost, and which decodes another."""
    mini = Mini(in_flight=2, asynchronous=True)
    mini.only_in_cpu(prompt(6))
    mini.add(prompt(1, seed=1), count=30)
    mini.begin_step()
    mini.begin_step()
    return mini


def test_a_load_begins_beside_steps_and_its_request_joins_one_after_it(mini: Mini) -> None:
    core = Core(mini)
    early = EarlyLoads(core)
    core.input_queue.put((ADD, lambda: mini.add(prompt(6), count=3)))
    assert early.look() and not early.look()
    assert (early.begun, early.looked_up) == (1, 1)
    assert mini.device._queues[LOAD]._queued, "it is under way, and no step has begun since"
    mini.end_step()
    mini.run()
    mini.check()
    assert mini.manager.stats.loaded


def test_what_it_finds_nothing_for_is_left_to_the_next_step(mini: Mini) -> None:
    core = Core(mini)
    early = EarlyLoads(core)
    core.input_queue.put((ADD, lambda: mini.add(prompt(6, seed=9), count=3)))
    assert early.look()
    assert (early.begun, early.looked_up) == (0, 1)
    mini.end_step()
    mini.run()
    mini.check()


@pytest.mark.parametrize("why", ["another request waits", "a command", "a pause", "no request"])
def test_nothing_is_taken_out_of_the_queue_then(mini: Mini, why: str) -> None:
    core = Core(mini)
    early = EarlyLoads(core)
    if why == "another request waits":
        mini.add(prompt(6), count=3)
    elif why == "a command":
        mini.ask("empty")
    elif why == "a pause":
        mini.tier.pause()
    core.input_queue.put((ABORT if why == "no request" else ADD, object))
    assert not early.look()
    assert core.input_queue.qsize() == 1
    mini.end_step()
    mini.run()
    mini.check()
