"""What a rank's device writes to when a load brings wrong bytes, where the engine sees it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvoffload_patch.integration.shared_files import SharedFile
from kvoffload_patch.integration.slot_counts import Alarms, SlotCounts, make_slot_counts
from kvoffload_patch.integration.worker.alarm import (
    Alarm,
    open_alarm,
    ranks_of_engine,
    reports,
)
from kvoffload_patch.transfer import device as devices
from kvoffload_patch.transfer.integrity import Checksums

CPU = torch.device("cpu")


class Device:
    """Takes memory that is registered, or refuses it with an error."""

    is_host = False

    def __init__(self, error: int = 0) -> None:
        self.error, self.registered = error, dict[int, int]()

    def registrar(self) -> Device:
        return self

    def register(self, address: int, nbytes: int) -> int:
        if not self.error:
            self.registered[address] = nbytes
        return self.error

    def unregister(self, address: int) -> int:
        return 0 * self.registered.pop(address)


@pytest.fixture
def file() -> Iterator[SharedFile]:
    made = make_slot_counts([3, 5])
    assert made is not None
    yield made
    made.close()


def test_what_is_written_there_is_seen_by_the_engine(file: SharedFile) -> None:
    device, board = Device(), SlotCounts(file.address, 5)
    made = Alarm(board, device)
    assert made.word is not None and made.word.tolist() == [0, 0]
    [(address, nbytes)] = device.registered.items()
    assert nbytes == len(board.memory) and address % 4096 == 0
    assert address < made.word.data_ptr() < address + nbytes
    made.word[0] = 1 + 30
    assert "rank 5 the bytes that were stored in CPU slot 30, found others" in Alarms(file).said()
    made.close()
    assert device.registered == {} and made.word is None
    made.close()


def test_where_the_device_cannot_write_there_is_no_alarm(
    file: SharedFile, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        made = Alarm(SlotCounts(file.address, 5), Device(error=801))
    assert made.word is None and "error 801" in caplog.text
    made.close()


@pytest.mark.parametrize(
    ("every", "is_host", "has_one"),
    [(16, False, True), (0, False, False), (1, False, False), (16, True, True)],
)
def test_there_is_one_where_some_blocks_are_compared(
    file: SharedFile, monkeypatch: pytest.MonkeyPatch, every: int, is_host: bool, has_one: bool
) -> None:
    device = Device()
    monkeypatch.setattr(device, "is_host", is_host, raising=False)
    monkeypatch.setattr(devices, "device_of", lambda on: device)
    checksums = Checksums(4, CPU, every)
    made = open_alarm(SlotCounts(file.address, 3), CPU, checksums)
    assert (made.word is not None) == (checksums.alarm is not None) == has_one
    assert bool(device.registered) == (has_one and not is_host)
    assert checksums.alarm is made.word
    made.check()
    made.ring()
    assert "rank 3 to carry out its part of each step, found that it" in Alarms(file).said()
    with pytest.raises(RuntimeError, match="expected all steps of this rank to be carried out"):
        made.check()
    made.close()
    assert device.registered == {}


def test_a_slot_with_wrong_bytes_is_named_rather_than_a_step_that_has_failed(
    file: SharedFile,
) -> None:
    made = Alarm(SlotCounts(file.address, 3), Device())
    made.word[0] = 1 + 30
    made.ring()
    assert "in CPU slot 30, found others" in Alarms(file).said()
    made.close()


@pytest.mark.parametrize(
    ("parallel", "ranks", "reporting"),
    [
        ({"tensor_parallel_size": 2}, 2, 0),
        ({"pipeline_parallel_size": 2}, 2, 1),
        ({"tensor_parallel_size": 4, "pipeline_parallel_size": 2}, 8, 4),
        ({"tensor_parallel_size": 2, "prefill_context_parallel_size": 2}, 4, 0),
    ],
)
def test_one_rank_reports_of_the_last_stage(
    parallel: dict[str, Any], ranks: int, reporting: int
) -> None:
    config = SimpleNamespace(parallel_config=SimpleNamespace(**parallel))
    workers = [SimpleNamespace(vllm_config=config, rank=rank) for rank in range(ranks)]
    assert [ranks_of_engine(worker) for worker in workers] == [ranks] * ranks
    assert [worker.rank for worker in workers if reports(worker)] == [reporting]


def test_the_only_rank_of_an_engine_reports_whatever_its_number() -> None:
    """With data parallel engines that a launcher of the user's starts, ranks count over all."""
    parallel = SimpleNamespace(tensor_parallel_size=1, world_size=2)
    assert reports(SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel), rank=1))
