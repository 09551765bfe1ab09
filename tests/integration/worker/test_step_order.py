"""A call by RPC and a step of a rank on two threads, as Ray's compiled graph has them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from integration.worker.runners import small_runner
from tier.plans import a_load, a_plan, a_store

from kvoffload_patch.integration.protocol import TIER
from kvoffload_patch.integration.worker import rpc, step_order
from kvoffload_patch.integration.worker.hooks import execute_model, sample_tokens
from kvoffload_patch.integration.worker.step_order import StepOrder


class Step:
    """What vLLM's scheduler describes."""

    total_num_scheduled_tokens = 5
    num_scheduled_tokens = {"a": 5}

    def __init__(self, plan: Any = None) -> None:
        self.kvoffload_plan = plan


class Output:
    sampled_token_ids = [[1]]
    req_ids = ["a"]


class Worker:
    """A rank with a tier of six slots."""

    def __init__(self) -> None:
        self.model_runner, self.rank = small_runner(), 0
        self.vllm_config = self.model_runner.vllm_config
        assert rpc.open_rank(self, 6).error == ""
        self.tier: Any = getattr(self.model_runner, TIER)

    def step(self, plan: Any = None, forward: Callable[[], object] = int) -> Any:
        """A whole step, as the hook has it."""

        def vllms_own(_: Any) -> Any:
            forward()
            return Output()

        return execute_model(vllms_own, self.model_runner, (Step(plan),), {})


LOAD = a_plan((a_load(1, (4,), (0,)),), wait_load=1, promised_loads=[1])
STORE = a_plan(store=a_store(1, (1, 2), (0, 1)))
CALLS = {
    "resize": lambda worker: rpc.resize_rank(worker, 4, 1),
    "drain": rpc.drain_rank,
    "wipe": rpc.wipe_rank,
    "finish": lambda worker: rpc.finish_rank(worker, None),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_comes_into_a_step_waits_for_its_end(name: str) -> None:
    """What the step is to store is stored when it was computed, and before slots are lost."""
    worker, steps, calls = Worker(), ThreadPoolExecutor(1), ThreadPoolExecutor(1)
    begun, goes_on = threading.Event(), threading.Event()

    def forward() -> None:
        begun.set()
        assert goes_on.wait(60)
        worker.model_runner.kv_caches[0][1].fill_(7.0)

    with steps, calls:
        step = steps.submit(worker.step, STORE, forward)
        assert begun.wait(60)
        slots = worker.tier._host.slots
        called = calls.submit(CALLS[name], worker)
        with pytest.raises(TimeoutError):
            called.result(timeout=0.2)
        goes_on.set()
        assert step.result(60).sampled_token_ids == [[1]]
        called.result(60)
    if name in ("resize", "drain"):
        stored = slots[0].view(worker.model_runner.kv_caches[0].dtype)
        assert stored[: worker.model_runner.kv_caches[0][1].numel()].eq(7.0).all()
    rpc.close_rank(worker)


@pytest.mark.parametrize("plan", [None, STORE])
@pytest.mark.parametrize("has_hold", [True, False])
def test_a_step_that_reads_no_load_and_finds_its_rank_closed_goes_on(
    plan: Any, has_hold: bool
) -> None:
    """It was sent before the call, and may have got hold of the tier."""
    worker = Worker()
    tier = worker.tier
    rpc.finish_rank(worker, None)
    if has_hold:
        setattr(worker.model_runner, TIER, tier)
    output = worker.step(plan)
    assert type(output) is Output and not hasattr(output, "kvoffload_result")


def test_what_vllm_raises_is_raised_if_the_rank_was_closed_within_the_step() -> None:
    worker = Worker()

    def forward() -> None:
        rpc.finish_rank(worker, None)
        raise LookupError("vLLM's own")

    with pytest.raises(LookupError, match="vLLM's own"):
        worker.step(forward=forward)


@pytest.mark.parametrize("has_hold", [True, False])
def test_a_step_that_reads_a_load_and_finds_its_rank_closed_does_not_begin(has_hold: bool) -> None:
    """What it was promised to read is brought by nobody."""
    worker = Worker()
    tier = worker.tier
    rpc.finish_rank(worker, None)
    if has_hold:
        setattr(worker.model_runner, TIER, tier)
    with pytest.raises(RuntimeError, match="found it closed, so the step may lack bytes"):
        worker.step(LOAD, pytest.fail)


def test_on_one_thread_a_call_within_a_step_is_carried_out_at_once() -> None:
    """A worker carries out a call between `execute_model` and `sample_tokens`, in that order."""
    order = StepOrder(pytest.fail)
    assert order.step_begins()
    with order.between_steps():
        pass
    order.step_ends()


@pytest.mark.parametrize("where", ["execute_model", "sample_tokens"])
def test_after_a_step_in_which_vllm_has_raised_a_call_waits_for_nothing(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has an engine in its own process may catch that, and reset it on another thread."""
    monkeypatch.setattr(step_order, "STEP_ENDS_S", 1.0)
    worker = Worker()
    runner, arguments = worker.model_runner, (Step(STORE),)

    def raises(*_: Any) -> Any:
        raise MemoryError("of vLLM's own")

    def step() -> None:
        if where == "execute_model":
            execute_model(raises, runner, arguments, {})
        assert execute_model(lambda _: None, runner, arguments, {}) is None
        sample_tokens(raises, runner, (None,), {})

    with ThreadPoolExecutor(1) as steps, pytest.raises(MemoryError, match="of vLLM's own"):
        steps.submit(step).result(60)
    assert rpc.drain_rank(worker)
    rpc.finish_rank(worker, None)


def test_a_step_that_does_not_end_fails_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_order, "STEP_ENDS_S", 0.05)
    order = StepOrder(pytest.fail)
    with ThreadPoolExecutor(1) as steps:
        assert steps.submit(order.step_begins).result(60)
    with pytest.raises(RuntimeError, match="found it still under way"), order.between_steps():
        pytest.fail("it is carried out")


def test_a_step_within_which_its_tier_was_lost_gives_no_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It hangs for longer than the call waits for it, and goes on."""
    monkeypatch.setattr(step_order, "STEP_ENDS_S", 0.05)
    monkeypatch.setattr(rpc, "_NOT_FREED", [])
    worker = Worker()
    runner, tier = worker.model_runner, worker.tier
    begun, goes_on = threading.Event(), threading.Event()

    def hangs(_: Any) -> None:
        begun.set()
        assert goes_on.wait(60)

    def step() -> Any:
        assert execute_model(hangs, runner, (Step(STORE),), {}) is None
        return sample_tokens(lambda _: Output(), runner, (None,), {})

    with ThreadPoolExecutor(1) as steps:
        running = steps.submit(step)
        assert begun.wait(60)
        with pytest.raises(RuntimeError, match="found it still under way"):
            rpc.finish_rank(worker, None)
        goes_on.set()
        with pytest.raises(RuntimeError, match=r"could not be \(.* still under way\), so a step"):
            running.result(60)
    tier.close()


def test_a_call_has_its_turn_where_steps_follow_each_other_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python's lock is with the thread of steps from the end of one to the middle of the next."""
    monkeypatch.setattr(step_order, "STEP_ENDS_S", 2.0)
    order, begun, over = StepOrder(int), threading.Event(), threading.Event()

    def steps() -> None:
        while not over.is_set():
            assert order.step_begins()
            begun.set()
            time.sleep(0.005)  # others can go on
            order.step_ends()

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(steps)
        try:
            assert begun.wait(60)
            for _ in range(3):
                with order.between_steps():
                    assert not order._within
        finally:
            over.set()
        running.result(60)


def test_a_call_has_its_turn_after_a_step_of_which_no_end_was_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the next step waits for the call, which waits for the step before that."""
    monkeypatch.setattr(step_order, "STEP_ENDS_S", 2.0)
    order = StepOrder(int)

    def call() -> None:
        with order.between_steps():
            pass

    with ThreadPoolExecutor(1) as steps, ThreadPoolExecutor(1) as calls:
        assert steps.submit(order.step_begins).result(60)
        called = calls.submit(call)
        while not order._calls:
            assert not called.done()
            time.sleep(0.001)
        assert steps.submit(order.step_begins).result(60)
        called.result(60)


def test_a_call_beside_steps_waits_for_what_they_have_given_the_device() -> None:
    settled: list[str] = []
    order = StepOrder(lambda: settled.append("device"))
    with ThreadPoolExecutor(1) as steps:
        assert steps.submit(order.step_begins).result(60)
        steps.submit(order.step_ends).result(60)
    with order.between_steps():
        assert settled == ["device"]
