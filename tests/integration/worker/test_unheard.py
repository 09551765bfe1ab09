"""A rank of which the engine gets neither a result nor an error."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from integration.worker.runners import keep_slots, small_runner
from tier.plans import a_load, a_plan, a_store

from kvoffload_patch.integration.protocol import RESULT, TIER
from kvoffload_patch.integration.shared_files import SharedFile
from kvoffload_patch.integration.slot_counts import Alarms, make_slot_counts
from kvoffload_patch.integration.worker import rpc
from kvoffload_patch.integration.worker.hooks import execute_model
from kvoffload_patch.integration.worker.tier import RankTier
from kvoffload_patch.integration.worker.unheard import UnheardRank
from kvoffload_patch.transfer.backends.torch import TorchBackend

STEP = SimpleNamespace(total_num_scheduled_tokens=5, num_scheduled_tokens={"a": 5})
SAYS = "this rank could not carry out its part of a step: "
STORE = a_plan(store=a_store(1, (1, 2), (0, 1)))
LOAD = a_plan((a_load(1, (4, 5), (0, 1)),), stores_done=1, wait_load=1, promised_loads=[1])
Board = tuple[SharedFile, Alarms]


@pytest.fixture
def worker() -> Iterator[Any]:
    """The second of two tensor-parallel ranks."""
    runner = small_runner(tensor_parallel_size=2)
    made = SimpleNamespace(model_runner=runner, rank=1, vllm_config=runner.vllm_config)
    yield made
    rpc.close_rank(made)


@pytest.fixture
def board() -> Iterator[Board]:
    file = make_slot_counts([0, 1])
    assert file is not None
    yield file, Alarms(file)
    file.close()


def opened(worker: Any, board: Board | None = None, **how: Any) -> Any:
    address = board[0].address if board is not None else None
    said = rpc.open_rank(worker, 8, integrity="sample", board=address, **how)
    assert said.error == ""
    return getattr(worker.model_runner, TIER)


def step(worker: Any, plan: Any = None) -> Any:
    """A whole step, as the hook has it; vLLM's output, which it ends with."""
    described = SimpleNamespace(**vars(STEP), kvoffload_plan=plan)
    output = SimpleNamespace(sampled_token_ids=[[1]], req_ids=["a"])
    return execute_model(lambda _: output, worker.model_runner, (described,), {})


def raises(*_: Any, **__: Any) -> Any:
    raise OSError("no such device")


@pytest.mark.parametrize(("rank", "kind"), [(0, RankTier), (1, UnheardRank)])
def test_the_engine_gets_the_result_of_one_rank_of_several(
    worker: Any, board: Board, rank: int, kind: type
) -> None:
    worker.rank = rank
    assert type(opened(worker, board)) is kind


def lost_plan(worker: Any, tier: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    return a_plan(store=a_store(3, (1, 2), (0, 1)))


def replaced_tensors(worker: Any, tier: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    worker.model_runner.kv_caches = [torch.zeros(7, 3, 5)]
    return STORE


def failed_step_without_tokens(worker: Any, tier: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    keep_slots(worker.model_runner, SimpleNamespace(fill_=raises))
    monkeypatch.setattr(STEP, "total_num_scheduled_tokens", 0)
    return STORE


def failed_load(worker: Any, tier: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    step(worker, STORE)
    monkeypatch.setattr(TorchBackend, "load", raises)
    return LOAD


def failed_forward(worker: Any, tier: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = {"begin": lambda *_: None, "close": int, "passes": bool}
    gate = SimpleNamespace(end=raises, learnt=False, **made)
    monkeypatch.setattr(tier, "_gate", gate)


def failed_end(worker: Any, tier: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(tier._engine, "poll", raises)


FAULTS = {
    lost_plan: "expected ticket 1 from gpu to cpu, found 3",
    replaced_tensors: "the KV tensors of this rank were replaced",
    failed_step_without_tokens: "no such device",
    failed_load: "expected copy 1 from cpu to gpu to arrive",
    failed_forward: "no such device",
    failed_end: "no such device",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_step_that_fails_on_it_goes_on_and_the_engine_sees_that(
    worker: Any, board: Board, fault: Any, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The others would wait for it otherwise."""
    tier = opened(worker, board)
    plan = fault(worker, tier, monkeypatch)
    assert board[1].said() == ""
    with caplog.at_level(logging.ERROR):
        output = step(worker, plan)
    assert output.sampled_token_ids == [[1]]
    assert "expected rank 1 to carry out its part of each step" in board[1].said()
    [found, *_] = [r for r in caplog.records if SAYS in r.getMessage()]
    assert found.exc_info and FAULTS[fault] in found.getMessage()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="expected no step after one that has failed"):
        tier.finish(None)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_without_a_board_its_process_ends(
    worker: Any, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on several hosts: vLLM notices that, and hears nothing else of it."""
    ended: list[str] = []
    tier = opened(worker, end=lambda: ended.append("this process"))
    step(worker, fault(worker, tier, monkeypatch))
    assert ended and set(ended) == {"this process"}


def test_where_its_process_is_not_to_be_ended_it_raises(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = lost_plan(worker, opened(worker), monkeypatch)
    with pytest.raises(RuntimeError, match="found 3"):
        step(worker, plan)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tier_that_cannot_be_finished_ends_the_process_of_a_rank_that_nobody_hears(
    worker: Any, board: Board, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its next step, if the engine goes on; the other rank raises then."""
    worker.rank = rank
    ended: list[str] = []
    tier = opened(worker, board, end=lambda: ended.append("this process"))
    monkeypatch.setattr(tier._engine, "drain", raises)
    with pytest.raises(OSError, match="no such device"):
        rpc.finish_rank(worker, None)
    with pytest.raises(RuntimeError, match="expected the CPU tier of this rank to be finished"):
        step(worker)
    assert ended == ["this process"] * rank


def test_a_tier_on_which_a_step_has_failed_is_not_detached(worker: Any, board: Board) -> None:
    """The rank has raised nothing, and the engine may not have looked since."""
    tier = opened(worker, board)
    step(worker, STORE)
    tier._board.ring()
    with pytest.raises(RuntimeError, match="expected all steps of this rank to be carried out"):
        tier.finish(None)
    assert "expected rank 1 to carry out its part" in board[1].said()


@pytest.mark.parametrize("shares", [True, False])
def test_a_tier_whose_steps_were_carried_out_is_finished_with_its_last_loads(
    shares: bool, worker: Any, board: Board
) -> None:
    opened(worker, board if shares else None)
    [layer] = worker.model_runner.kv_caches
    step(worker, STORE)
    layer[4:6] = -1
    rpc.finish_rank(worker, LOAD)
    assert layer[4:6].equal(layer[1:3])


def test_a_step_that_is_carried_out_says_nothing_and_has_a_result(
    worker: Any, board: Board
) -> None:
    opened(worker, board)
    for plan in (STORE, LOAD, None):
        assert hasattr(step(worker, plan), RESULT)
    assert board[1].said() == ""


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("link", ["store", "load"])
def test_a_failed_copy_is_said_to_cost_what_it_costs(
    shares: bool, link: str, worker: Any, board: Board, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The engine loads a block that nobody has told it was not stored on this rank."""
    ended: list[str] = []
    opened(worker, board if shares else None, end=lambda: ended.append("this process"))
    if link == "store":
        monkeypatch.setattr(TorchBackend, "store", raises)
    step(worker, STORE)
    if link == "load":
        monkeypatch.setattr(TorchBackend, "load", raises)
        step(worker, a_plan((a_load(1, (4, 5), (0, 1)),), stores_done=1))
    said = [r.getMessage() for r in caplog.records if "has failed" in r.getMessage()]
    assert len(said) == 1 and ("are recomputed when they are needed" in said[0]) == shares
    assert ("the engine does not hear of it" in said[0]) != shares and not ended
    if not shares:
        if link == "store":
            step(worker, a_plan((a_load(1, (4, 5), (0, 1)),), stores_done=1))
        step(worker, a_plan(loads_done=1, wait_load=1, promised_loads=[1]))
        assert ended == ["this process"]
