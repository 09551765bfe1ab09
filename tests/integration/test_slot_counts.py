"""What the ranks of one engine tell each other of their slots."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoffload_patch.integration import slot_counts as growth_board
from kvoffload_patch.integration.slot_counts import (
    SlotCounts,
    SlotCountsAddress,
    make_slot_counts,
)
from kvoffload_patch.links import LOAD, STORE

WRITER = """
import sys
from kvoffload_patch.integration.slot_counts import SlotCountsAddress, SlotCounts

board = SlotCounts(SlotCountsAddress(sys.argv[1], (4, 7)), 7)
print("open", flush=True)
for line in sys.stdin:
    print(*board.exchange(int(line), int(line) < 100_000), flush=True)
"""


@pytest.fixture
def address() -> Iterator[SlotCountsAddress]:
    made = make_slot_counts([4, 7])
    assert made is not None, "this machine has no shared memory"
    yield made
    made.remove()


def test_the_rank_with_the_fewest_counts(address: SlotCountsAddress) -> None:
    four, seven = SlotCounts(address, 4), SlotCounts(address, 7)
    assert four.exchange(20, True) == (0, True), "the other has not said anything yet"
    assert seven.exchange(8, True) == (8, True)
    assert four.exchange(30, False) == (8, True), "the other will have more"
    assert seven.exchange(31, True) == (30, False), "this one has thirty for good"


@pytest.mark.parametrize("first", [4, 7])
def test_of_equal_ranks_one_that_has_ended_counts(address: SlotCountsAddress, first: int) -> None:
    boards = [SlotCounts(address, rank) for rank in (first, 11 - first)]
    boards[0].exchange(9, False)
    assert boards[1].exchange(9, True) == (9, False)
    assert boards[0].exchange(9, False) == (9, False)


def test_processes_share_it_after_its_name_is_gone(address: SlotCountsAddress) -> None:
    own = SlotCounts(address, 4)
    other = subprocess.Popen(
        [sys.executable, "-c", WRITER, address.path],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )  # fmt: skip
    assert other.stdin and other.stdout
    assert other.stdout.readline() == "open\n"
    address.remove()
    for slots in (1, 70_000, 100_000):
        own.exchange(2 * slots, True)
        print(slots, file=other.stdin, flush=True)
        assert other.stdout.readline() == f"{slots} {slots < 100_000}\n"
        assert own.exchange(2 * slots, True) == (slots, slots < 100_000)
    other.stdin.close()
    assert other.wait(30) == 0
    other.stdout.close()


def test_only_who_finds_it_can_use_it(address: SlotCountsAddress) -> None:
    assert address.is_reachable()
    assert Path(address.path).stat().st_mode & 0o777 == 0o600
    address.remove()
    assert not address.is_reachable()
    with pytest.raises(FileNotFoundError):
        SlotCounts(address, 4)
    address.remove()


def test_without_shared_memory_there_is_no_board(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(growth_board, "_FOLDER", str(tmp_path / "missing"))
    assert make_slot_counts([0, 1]) is None


def test_shared_memory_that_is_full_is_no_board_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(growth_board, "_FOLDER", str(tmp_path))
    monkeypatch.setattr(growth_board, "_cell", full)
    assert make_slot_counts([0, 1]) is None
    assert list(tmp_path.iterdir()) == []


def test_ranks_of_one_number_have_no_board() -> None:
    assert make_slot_counts([0, 0]) is None


# With a /dev/shm of its own, real and too small, or one that cannot be written.
OWN_SHM = """
mount -t tmpfs -o "$0" none /dev/shm || exit 9
if [ "$0" = size=4k ]; then head -c 4096 /dev/zero > /dev/shm/other; fi
exec "$1" -c "
import os
from kvoffload_patch.integration.slot_counts import make_slot_counts
print(make_slot_counts([0, 1]), os.listdir('/dev/shm'))
"
"""


@pytest.mark.parametrize(("how", "left"), [("size=4k", "['other']"), ("ro", "[]")])
def test_a_real_dev_shm_that_is_full_or_unwritable_is_no_board(how: str, left: str) -> None:
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs mounts of its own")
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", OWN_SHM, how, sys.executable],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, f"None {left}\n"), done.stderr


def test_what_is_done_is_what_all_ranks_have_done(address: SlotCountsAddress) -> None:
    four, seven = SlotCounts(address, 4), SlotCounts(address, 7)
    assert four.exchange_done(((LOAD, 3), (STORE, 9))) == ((LOAD, 0), (STORE, 0))
    assert seven.exchange_done(((STORE, 5), (LOAD, 8))) == ((LOAD, 3), (STORE, 5))
    assert four.exchange_done(((LOAD, 8), (STORE, 9))) == ((LOAD, 8), (STORE, 5))
    assert seven.exchange(6, False) == (0, True), "slots and copies have cells of their own"
    assert four.exchange(6, False) == (6, False)
