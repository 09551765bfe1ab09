"""A rank that does not answer in time: vLLM takes its late answer for that to the next call."""

from __future__ import annotations

from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
multiproc = pytest.importorskip("vllm.v1.executor.multiproc_executor")

from integration.engine.mini import Mini  # noqa: E402
from scheduler_half.scenarios import prompt  # noqa: E402

from kvoffload_patch.integration.engine.ranks.workers import RankGroup  # noqa: E402
from kvoffload_patch.integration.errors import PromiseBroken, TierRefused  # noqa: E402

ANSWER = multiproc.WorkerProc.ResponseStatus.SUCCESS, (True, True)


class Answers:
    """What the process of a worker answers: None at the end of the time, or what interrupts."""

    def __init__(self, *answers: Any) -> None:
        self.left = deque(answers)
        self.waited: list[float | None] = []

    def dequeue(self, timeout: float | None, cancel: object = None) -> Any:
        """The next answer."""
        self.waited.append(timeout)
        found = self.left.popleft()
        if found is None:
            raise TimeoutError
        if isinstance(found, BaseException):
            raise found
        return found


def executor_of(*answers: Any) -> tuple[Any, list[Any]]:
    """vLLM's own executor of processes, over one that answers so; and what it was sent."""
    executor, sent = object.__new__(multiproc.MultiprocExecutor), list[Any]()
    executor.is_failed, executor.futures_queue = False, deque()
    executor.rpc_broadcast_mq = SimpleNamespace(enqueue=sent.append)
    executor.response_mqs = [queue] = [Answers(*answers)]
    # Up to 0.10, and to 0.19.
    executor.workers, executor.io_thread_pool = [SimpleNamespace(worker_response_mq=queue)], None
    executor.shutdown_event = None
    return executor, sent


@pytest.mark.parametrize("how", [None, KeyboardInterrupt()], ids=["late", "interrupted"])
def test_a_rank_that_did_not_answer_is_sent_nothing_more(how: BaseException | None) -> None:
    executor, sent = executor_of(how, ANSWER, ANSWER)
    ranks = RankGroup(executor)
    with pytest.raises(TierRefused if how is None else KeyboardInterrupt):
        ranks.drain()
    for call in (ranks.drain, ranks.weights, ranks.wipe, lambda: ranks.finish(None)):
        with pytest.raises(TierRefused, match="whose late answer would be taken for that to"):
            call()
    ranks.give_back()
    ranks.close()
    assert ranks.silent and len(sent) == 1


def test_processes_of_their_own_are_not_asked_to_close() -> None:
    """They may have ended, and the shutdown would wait for an answer; their end frees it all."""
    executor, sent = executor_of(ANSWER)
    RankGroup(executor).close()
    assert not sent


def test_the_end_of_an_engine_asks_no_rank_that_was_late() -> None:
    """It would raise, and vLLM's shutdown would end there."""

    def collective_rpc(*_: Any, **__: Any) -> Any:
        raise TimeoutError

    ranks = RankGroup(SimpleNamespace(driver_worker=object(), collective_rpc=collective_rpc))
    with pytest.raises(TierRefused, match="TimeoutError"):
        ranks.drain()
    ranks.close()


@pytest.mark.parametrize(("given", "least"), [(None, 299), ("10", 299), ("1800", 1799)])
def test_a_rank_has_as_long_as_the_step_before_has(
    given: str | None, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM takes the step's answer first, within the time of this call."""
    if given is not None:
        monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", given)
    executor, _ = executor_of(ANSWER)
    RankGroup(executor).drain()
    (waited,) = executor.response_mqs[0].waited
    assert least < waited <= least + 1


@pytest.mark.parametrize(
    "module", ["vllm.v1.executor.uniproc_executor", "vllm.v1.executor.ray_executor"]
)
def test_whose_answers_are_told_apart_is_asked_after_an_interrupt(module: str) -> None:
    calls: list[str] = []

    def collective_rpc(function: Any, timeout: float, args: tuple[Any, ...]) -> Any:
        calls.append(function.__name__)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return [(True, None)]

    executor = type("Executor", (), {"__module__": module})()
    executor.collective_rpc = collective_rpc
    if module.endswith("uniproc_executor"):
        executor.driver_worker = object()
    ranks = RankGroup(executor)
    with pytest.raises(KeyboardInterrupt):
        ranks.drain()
    ranks.finish(None)
    assert calls == ["drain_rank", "finish_rank"]


def with_ranks(mini: Mini, *answers: Any) -> list[Any]:
    """Have the tier ask its ranks by vLLM's executor; what that is sent."""
    executor, sent = executor_of(*answers)
    asked = RankGroup(executor)

    def ask(name: str, *args: Any) -> Any:
        try:
            return getattr(asked, name)(*args)
        finally:
            mini.ranks.silent = asked.silent

    for name in ("drain", "wipe", "check_room", "finish"):
        setattr(mini.ranks, name, partial(ask, name))
    return sent


@pytest.mark.parametrize("answers", [(None, ANSWER, ANSWER), (KeyboardInterrupt(), ANSWER, ANSWER)])
def test_no_step_is_sent_once_a_reset_was_not_answered(answers: tuple[Any, ...]) -> None:
    """vLLM tells who has asked for the reset what it raised, and goes on to the next step."""
    mini = Mini(late=9)
    mini.add(prompt(3, seed=1), count=2)
    mini.step()
    sent = with_ranks(mini, *answers)
    assert mini.manager.busy
    with pytest.raises((PromiseBroken, KeyboardInterrupt)):
        mini.scheduler.reset_prefix_cache()
    plans = len(mini.plans)
    for _ in range(2):
        with pytest.raises(PromiseBroken, match="the CPU tier failed .*restart the server"):
            mini.scheduler.schedule()
    assert len(sent) == 1 and len(mini.plans) == plans


def test_an_interrupt_while_it_is_detached_lets_no_step_begin() -> None:
    """The loads of a plan that was taken off may not have been carried out."""
    mini = Mini()
    mini.add(prompt(3, seed=1), count=2)
    sent = with_ranks(mini, KeyboardInterrupt())
    mini.breaker.failed("here", LookupError("made to fail"))
    with pytest.raises(KeyboardInterrupt):
        mini.scheduler.schedule()
    with pytest.raises(PromiseBroken, match="here: LookupError: made to fail"):
        mini.scheduler.schedule()
    assert len(sent) == 1


def test_a_size_that_a_rank_does_not_answer_for_ends_the_engine() -> None:
    mini = Mini(num_slots=20)
    resized = mini.ask("resize", gib=8 / 1024)
    mini.add(prompt(3, seed=1), count=2)
    mini.run()
    sent = with_ranks(mini, None, ANSWER)
    more = mini.ask("resize", gib=20 / 1024)
    mini.add(prompt(3, seed=2), count=2)
    with pytest.raises(PromiseBroken, match="resize: TierRefused: expected every worker to answer"):
        mini.run()
    assert not resized.error and "the engine ends" in more.error and len(sent) == 1
