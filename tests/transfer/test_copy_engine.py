"""`CopyEngine`: each plan once, in the order of its tickets, with the waits that it asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kvoffload_patch.transfer.copy_engine import CopyEngine
from kvoffload_patch.transfer.errors import TransferError
from kvoffload_patch.transfer.lane import HostLane
from kvoffload_patch.transfer.layout import BlockLayout


@dataclass
class Batch:
    ticket: int
    gpu_block_ids: Sequence[int] = (1,)
    cpu_slots: Sequence[int] = (2,)


@dataclass
class Plan:
    """Not the tier's own class: the engine takes anything with these attributes."""

    loads: Sequence[Batch] = ()
    store: Batch | None = None
    wait_load: int = 0
    wait_store: int = 0
    stores_done: int = 0
    loads_done: int = 0


class Recorder:
    """A backend, and two lanes, that write down what they are asked."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def load(self, gpu_block_ids: Sequence[int], cpu_slots: Sequence[int]) -> None:
        self.calls.append(("load", tuple(gpu_block_ids), tuple(cpu_slots)))

    def store(self, gpu_block_ids: Sequence[int], cpu_slots: Sequence[int]) -> None:
        self.calls.append(("store", tuple(gpu_block_ids), tuple(cpu_slots)))

    def take(self) -> list[Any]:
        calls, self.calls = self.calls, []
        return calls


class RecordingLane(HostLane):
    def __init__(self, name: str, calls: Recorder) -> None:
        super().__init__()
        self.stream = cast("None", f"{name} stream")
        self._name = name
        self._recorder = calls

    def _note(self, *what: Any) -> None:
        self._recorder.calls.append((self._name, *what))

    def follow_compute(self) -> None:
        self._note("follow compute")

    def hold(self, stream: object, ticket: int) -> None:
        self._note("hold", stream or "compute", ticket)

    def submit(self, ticket: int, copy: Callable[[], None]) -> None:
        self._note("submit", ticket)
        super().submit(ticket, copy)

    def drain(self) -> None:
        self._note("drain")


def layout() -> BlockLayout:
    return BlockLayout([torch.zeros(4, 3)], 4)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def engine(recorder: Recorder) -> CopyEngine:
    return CopyEngine(layout(), recorder)


@pytest.fixture
def with_lanes(engine: CopyEngine, recorder: Recorder) -> CopyEngine:
    engine._loads = RecordingLane("loads", recorder)
    engine._stores = RecordingLane("stores", recorder)
    return engine


def test_loads_are_submitted_before_the_forward_pass_and_the_store_after_it(
    engine: CopyEngine, recorder: Recorder
) -> None:
    plan = Plan(
        loads=[Batch(1, (3, 1), (0, 5)), Batch(2, (2,), (7,))], store=Batch(1, (0, 3), (8, 9))
    )
    engine.begin_step(plan)
    assert recorder.take() == [("load", (3, 1), (0, 5)), ("load", (2,), (7,))]
    assert engine.poll() == (2, 0)
    engine.end_step()
    assert recorder.take() == [("store", (0, 3), (8, 9))]
    assert engine.poll() == (2, 1)


def test_ending_a_step_twice_stores_once(engine: CopyEngine, recorder: Recorder) -> None:
    engine.begin_step(Plan(store=Batch(1)))
    engine.end_step()
    engine.end_step()
    engine.drain()
    assert len(recorder.calls) == 1
    assert engine.poll() == (0, 1)


@pytest.mark.parametrize("following", [None, Plan(loads=[Batch(1, (3,), (3,))])])
def test_a_store_left_over_goes_first_in_the_next_step(
    engine: CopyEngine, recorder: Recorder, following: Plan | None
) -> None:
    engine.begin_step(Plan(store=Batch(1)))
    assert recorder.calls == []
    engine.begin_step(following)
    assert recorder.calls[0] == ("store", (1,), (2,))
    engine.end_step()
    assert [call[0] for call in recorder.calls].count("store") == 1


def test_steps_without_a_plan_do_nothing(engine: CopyEngine, recorder: Recorder) -> None:
    for _ in range(3):
        engine.begin_step(None)
        engine.end_step()
    engine.drain()
    assert recorder.calls == []
    assert engine.poll() == (0, 0)


def test_draining_submits_the_store_that_is_left(engine: CopyEngine, recorder: Recorder) -> None:
    engine.begin_step(Plan(store=Batch(1)))
    engine.drain()
    assert recorder.take() == [("store", (1,), (2,))]
    assert engine.poll() == (0, 1)


@pytest.mark.parametrize("found", [0, 1, 3, 7])
def test_a_load_out_of_order_is_an_error_and_is_not_submitted(
    engine: CopyEngine, recorder: Recorder, found: int
) -> None:
    engine.begin_step(Plan(loads=[Batch(1)]))
    recorder.take()
    with pytest.raises(TransferError, match=f"expected load ticket 2, found {found}:"):
        engine.begin_step(Plan(loads=[Batch(found)]))
    assert recorder.calls == []
    assert engine.poll() == (1, 0)


@pytest.mark.parametrize("found", [0, 1, 3, 7])
def test_a_store_out_of_order_is_an_error_and_is_not_submitted(
    engine: CopyEngine, recorder: Recorder, found: int
) -> None:
    engine.begin_step(Plan(store=Batch(1)))
    engine.begin_step(Plan(store=Batch(found)))
    recorder.take()
    with pytest.raises(TransferError, match=f"expected store ticket 2, found {found}:"):
        engine.end_step()
    assert recorder.calls == []
    assert engine.poll() == (0, 1)


def test_the_same_plan_twice_is_an_error(engine: CopyEngine, recorder: Recorder) -> None:
    plan = Plan(loads=[Batch(1)], store=Batch(1))
    engine.begin_step(plan)
    engine.end_step()
    with pytest.raises(TransferError, match="a plan was lost or came twice"):
        engine.begin_step(plan)
    assert [call[0] for call in recorder.calls] == ["load", "store"]


def test_every_wait_of_a_plan_is_where_it_belongs(
    with_lanes: CopyEngine, recorder: Recorder
) -> None:
    plan = Plan([Batch(1), Batch(2)], Batch(1), 6, 5, 4, 3)
    with_lanes.begin_step(plan)
    assert recorder.take() == [
        # The forward pass, and with it the loads, wait for stores of blocks handed out.
        ("stores", "hold", "compute", 5),
        ("loads", "follow compute"),
        ("stores", "hold", "loads stream", 4),
        ("loads", "submit", 1),
        ("load", (1,), (2,)),
        ("loads", "submit", 2),
        ("load", (1,), (2,)),
        ("loads", "hold", "compute", 6),
    ]
    with_lanes.end_step()
    assert recorder.take() == [
        ("stores", "follow compute"),
        ("loads", "hold", "stores stream", 3),
        ("stores", "submit", 1),
        ("store", (1,), (2,)),
    ]


def test_a_plan_without_transfers_only_waits(with_lanes: CopyEngine, recorder: Recorder) -> None:
    with_lanes.begin_step(Plan(wait_load=2, wait_store=1, stores_done=1, loads_done=1))
    with_lanes.end_step()
    assert recorder.calls == [
        ("stores", "hold", "compute", 1),
        ("loads", "hold", "compute", 2),
    ]


def test_draining_waits_for_both_directions(with_lanes: CopyEngine, recorder: Recorder) -> None:
    with_lanes.begin_step(Plan(store=Batch(1)))
    recorder.take()
    with_lanes.drain()
    calls = recorder.take()
    assert ("stores", "submit", 1) in calls
    assert sorted(calls[-2:]) == [("loads", "drain"), ("stores", "drain")]


def test_a_device_that_is_neither_cpu_nor_cuda_is_refused(recorder: Recorder) -> None:
    other = cast("BlockLayout", SimpleNamespace(device=torch.device("meta")))
    with pytest.raises(TransferError, match="expected KV tensors on a CPU or CUDA device"):
        CopyEngine(other, recorder)
