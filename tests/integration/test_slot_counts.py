"""What the ranks of one engine tell each other of their slots."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvoffload_patch.integration import slot_counts as growth_board
from kvoffload_patch.integration.shared_files import SharedFile, SharedFileAddress
from kvoffload_patch.integration.slot_counts import Alarms, SlotCounts, make_slot_counts
from kvoffload_patch.links import FAILURES, LOAD, MISMATCH, RAISED, STORE, Failure
from scripts.soak.watch import shared_files

WRITER = """
import sys
from kvoffload_patch.integration.shared_files import SharedFileAddress
from kvoffload_patch.integration.slot_counts import SlotCounts

board = SlotCounts(SharedFileAddress(sys.argv[1], sys.argv[2], (4, 7)), 7)
print("open", flush=True)
for line in sys.stdin:
    print(*board.exchange(int(line), int(line) < 100_000), flush=True)
"""
# The engine's side, killed before it has told anyone.
KILLED = """
import os, signal
from kvoffload_patch.integration.slot_counts import Alarms, SlotCounts, make_slot_counts

board = make_slot_counts([0, 1])
SlotCounts(board.address, 0).exchange(3, True)
print(board.address.name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.fixture
def board() -> Iterator[SharedFile]:
    made = make_slot_counts([4, 7])
    assert made is not None, "this machine has no shared memory"
    yield made
    with suppress(OSError):  # a test has
        made.close()


@pytest.fixture
def address(board: SharedFile) -> SharedFileAddress:
    return board.address


def test_the_rank_with_the_fewest_counts(address: SharedFileAddress) -> None:
    four, seven = SlotCounts(address, 4), SlotCounts(address, 7)
    assert four.exchange(20, True) == (0, True), "the other has not said anything yet"
    assert seven.exchange(8, True) == (8, True)
    assert four.exchange(30, False) == (8, True), "the other will have more"
    assert seven.exchange(31, True) == (30, False), "this one has thirty for good"


@pytest.mark.parametrize("first", [4, 7])
def test_of_equal_ranks_one_that_has_ended_counts(address: SharedFileAddress, first: int) -> None:
    boards = [SlotCounts(address, rank) for rank in (first, 11 - first)]
    boards[0].exchange(9, False)
    assert boards[1].exchange(9, True) == (9, False)
    assert boards[0].exchange(9, False) == (9, False)


def test_processes_share_it_after_the_engine_has_closed_it(board: SharedFile) -> None:
    own, address = SlotCounts(board.address, 4), board.address
    other = subprocess.Popen(
        [sys.executable, "-c", WRITER, address.path, address.name],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    assert other.stdin and other.stdout
    assert other.stdout.readline() == "open\n"
    board.close()
    for slots in (1, 70_000, 100_000):
        own.exchange(2 * slots, True)
        print(slots, file=other.stdin, flush=True)
        assert other.stdout.readline() == f"{slots} {slots < 100_000}\n"
        assert own.exchange(2 * slots, True) == (slots, slots < 100_000)
    other.stdin.close()
    assert other.wait(30) == 0
    other.stdout.close()


def test_only_who_finds_it_can_use_it(board: SharedFile) -> None:
    address = board.address
    assert address.is_reachable()
    assert Path(address.path).stat().st_mode & 0o777 == 0o600
    board.close()
    assert not address.is_reachable()
    with pytest.raises(FileNotFoundError):
        SlotCounts(address, 4)


def test_a_rank_keeps_no_file_open_for_its_view_but_that_of_the_mapping(
    address: SharedFileAddress,
) -> None:
    before = set(os.listdir("/proc/self/fd"))
    view = SlotCounts(address, 4)
    assert view.exchange(1, True) == (0, True)
    del view
    assert set(os.listdir("/proc/self/fd")) == before


def test_an_engine_that_is_killed_leaves_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.startswith("/memfd:kvoffload-")
    assert [name for name in shared_files() if name in done.stdout] == []


def test_without_such_files_there_is_no_board(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert make_slot_counts([0, 1]) is None


def test_memory_that_is_full_is_no_board_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(growth_board.SharedFile, "write", full)
    assert make_slot_counts([0, 1]) is None
    assert set(os.listdir("/proc/self/fd")) == before


def test_ranks_of_one_number_have_no_board() -> None:
    assert make_slot_counts([0, 0]) is None


def test_what_is_done_is_what_all_ranks_have_done(address: SharedFileAddress) -> None:
    four, seven = SlotCounts(address, 4), SlotCounts(address, 7)
    assert four.exchange_done(((LOAD, 3), (STORE, 9))) == (((LOAD, 0), (STORE, 0)), ())
    assert seven.exchange_done(((STORE, 5), (LOAD, 8))) == (((LOAD, 3), (STORE, 5)), ())
    assert four.exchange_done(((LOAD, 8), (STORE, 9))) == (((LOAD, 8), (STORE, 5)), ())
    assert seven.exchange(6, False) == (0, True), "slots and copies have cells of their own"
    assert four.exchange(6, False) == (6, False)


def test_nobody_sees_that_a_failed_copy_is_done_without_that_it_has_failed(
    address: SharedFileAddress,
) -> None:
    four, seven = SlotCounts(address, 4), SlotCounts(address, 7)
    done = ((LOAD, 9), (STORE, 9))
    four.exchange_done(done)
    failed = tuple(Failure(LOAD, n, why) for n, why in ((8, MISMATCH), (6, RAISED)))
    for reader in (seven, four):
        reader.exchange_done(done)
        seen = seven.exchange_done(done, failed)
        assert seen == (((LOAD, 6), (STORE, 9)), (Failure(LOAD, 6, RAISED),)), "the first of them"
        assert four.exchange_done(done) == seen
    seen = seven.exchange_done(done, failed[:1])
    assert seen == (((LOAD, 8), (STORE, 9)), (Failure(LOAD, 8, MISMATCH),)), "that one is known"
    four.exchange_done(((LOAD, 7), (STORE, 9)))
    assert seven.exchange_done(done, failed[:1])[0] == ((LOAD, 7), (STORE, 9))
    assert seven.exchange_done(done)[1] == ()


@pytest.mark.parametrize("reason", FAILURES)
def test_the_board_says_why_a_copy_failed(address: SharedFileAddress, reason: str) -> None:
    four, seven = SlotCounts(address, 4), SlotCounts(address, 7)
    four.exchange_done(((STORE, 5),), (Failure(STORE, 2, reason),))
    assert seven.exchange_done(((STORE, 5),)) == (
        ((LOAD, 0), (STORE, 2)),
        (Failure(STORE, 2, reason),),
    )


@pytest.mark.parametrize("ranks", [(4, 7), (0, 1, 2), tuple(range(8))])
def test_the_engine_sees_each_ranks_alarm_after_it_has_closed_the_board(
    ranks: tuple[int, ...],
) -> None:
    file = make_slot_counts(ranks)
    assert file is not None
    alarms, boards = Alarms(file), [SlotCounts(file.address, rank) for rank in ranks]
    file.close()
    for board in boards:
        board.exchange(9, False)
        board.exchange_done(((LOAD, 3), (STORE, 9)))
    assert alarms.said() == "", "slots and copies have cells of their own"
    boards[-1].ring()
    assert [board.alarm for board in boards] == [False] * (len(ranks) - 1) + [True]
    said = alarms.said()
    assert said.startswith(f"kvoffload_patch: expected rank {ranks[-1]} to carry out its part ")
    assert boards[0].exchange(9, False) == (9, False)
    assert boards[0].exchange_done(((LOAD, 3), (STORE, 9))) == (((LOAD, 3), (STORE, 9)), ())
