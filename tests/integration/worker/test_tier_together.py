"""Ranks that tell each other what they have done, on copies of the CPU device.

Most have the same bytes, and their slots in common.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine.late_copies import LateQueue
from integration.worker.runners import small_runner
from tier.plans import a_load, a_plan, a_store

from kvoffload_patch.integration.protocol import RESULT
from kvoffload_patch.integration.shared_files import SharedFile
from kvoffload_patch.integration.slot_counts import SlotCounts, make_slot_counts
from kvoffload_patch.integration.worker.tier import RankTier
from kvoffload_patch.links import LOAD, MISMATCH, STORE, Failure
from kvoffload_patch.plan import TransferPlan, TransferResult
from kvoffload_patch.transfer import engine as copy_engine
from kvoffload_patch.transfer.backends.torch import TorchBackend

STEP = SimpleNamespace(total_num_scheduled_tokens=5, num_scheduled_tokens={"a": 5})
Ranks = list[RankTier]


def step(rank: RankTier, plan: TransferPlan | None = None) -> TransferResult:
    """A whole step of one rank; what it says is done."""
    rank.begin_step(plan, STEP)
    output = SimpleNamespace(sampled_token_ids=[[1]], req_ids=["a"])
    return getattr(rank.end_step(output), RESULT)  # type: ignore[no-any-return]


def kv(rank: RankTier) -> torch.Tensor:
    return rank._runner.kv_caches[0]  # type: ignore[no-any-return]


@pytest.fixture
def open_ranks() -> Iterator[Callable[..., Ranks]]:
    """Opens two ranks of seven blocks each that hold the same; the second as late as is asked.

    If not ``common``, each has its own slots.
    """
    opened: Ranks = []

    def open_both(
        monkeypatch: pytest.MonkeyPatch,
        late: bool = False,
        slots: int = 8,
        common: bool = True,
        integrity: str = "sample",
    ) -> Ranks:
        board, file = make_slot_counts([3, 5]), SharedFile([3, 5])
        assert board is not None
        file.resize(slots * 512)
        for rank in (3, 5):
            runner = small_runner(tensor_parallel_size=2)
            if late and rank == 5:
                monkeypatch.setattr(copy_engine, "SyncCopyQueue", LateQueue)
            opened.append(
                RankTier(
                    runner, slots, alone=False, board=SlotCounts(board.address, rank),
                    integrity=integrity, common=[file.address] if common else [], rank=rank,
                )
            )  # fmt: skip
        board.close()
        file.close()
        return opened

    yield open_both
    for rank in opened:
        rank.close()


def test_each_stores_to_its_own_slots_and_loads_from_all(
    open_ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = open_ranks(monkeypatch)
    stored: list[tuple[int, ...]] = []
    as_made = TorchBackend.store
    monkeypatch.setattr(
        TorchBackend, "store", lambda s, ids, slots, streams=None: stored.append(tuple(slots))
        or as_made(s, ids, slots, streams),
    )  # fmt: skip
    plan = a_plan(store=a_store(1, (1, 2, 3), (0, 1, 2)))
    assert step(ranks[0], plan).done_on(STORE) == 0, "the other has not"
    assert step(ranks[1], plan).done_on(STORE) == 1
    assert step(ranks[0]).done_on(STORE) == 1
    assert stored == [(0, 2), (1,)]
    wanted = kv(ranks[0])[1:4].clone()
    load = a_plan(
        (a_load(1, (4, 5, 6), (0, 1, 2)),), stores_done=1, wait_load=1, promised_loads=[1]
    )
    for rank in ranks:
        kv(rank)[4:] = -1.0
        step(rank, load)
        assert torch.equal(kv(rank)[4:], wanted)


def test_a_store_is_not_readable_before_the_rank_that_is_behind_has_made_it(
    open_ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a slot free for another store before that rank has loaded from it."""
    ahead, behind = open_ranks(monkeypatch, late=True)
    plan = a_plan(store=a_store(1, (1, 2), (0, 1)))
    said = [step(ahead, plan).done_on(STORE), step(behind, plan).done_on(STORE)]
    for _ in range(LateQueue.patience):
        said += [step(ahead).done_on(STORE), step(behind).done_on(STORE)]
    assert said == [0] * (2 * LateQueue.patience + 1) + [1]
    assert step(ahead).done_on(STORE) == 1
    load = a_plan((a_load(1, (4, 5), (0, 1)),), stores_done=1)
    assert step(ahead, load).done_on(LOAD) == 0, "it has loaded itself"
    step(behind, load)
    assert step(ahead).done_on(LOAD) == 0
    behind.drain()
    step(behind)
    assert step(ahead).done_on(LOAD) == 1


def test_a_store_of_no_slot_of_its_own_is_done_at_once(
    open_ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = open_ranks(monkeypatch)
    plan = a_plan(store=a_store(1, (1,), (4,)))
    step(first, plan)
    assert step(second, plan).done_on(STORE) == 1


@pytest.mark.parametrize(("common", "integrity"), [(True, "sample"), (True, "off"), (False, "off")])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_store_that_fails_on_one_rank_is_never_read(
    failing: int,
    common: bool,
    integrity: str,
    open_ranks: Callable[..., Ranks],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each says so, and there, should it be read all the same, no step that reads it begins."""
    ranks = open_ranks(monkeypatch, common=common, integrity=integrity)
    plan = a_plan(store=a_store(1, (1, 2), (0, 1)))

    def broken(*_: Any, **__: Any) -> Any:
        raise OSError("out of memory")

    for at, rank in enumerate(ranks):
        with monkeypatch.context() as one:
            if at == failing:
                one.setattr(TorchBackend, "store", broken)
            step(rank, plan)
    for rank in ranks:
        said = step(rank)
        assert (said.done_on(STORE), said.failed_on(STORE)) == (1, (1,))
    load = a_plan((a_load(1, (4, 5), (0, 1)),), stores_done=1, wait_load=1, promised_loads=[1])
    step(ranks[1 - failing], load)
    with pytest.raises(RuntimeError, match="an earlier copy of some of these blocks"):
        ranks[failing].begin_step(load, STEP)


def test_bytes_that_change_in_common_memory_are_found_by_the_rank_that_stored_them(
    open_ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = open_ranks(monkeypatch)
    plan = a_plan(store=a_store(1, (1, 2), (0, 1)))
    for rank in ranks:
        step(rank, plan)
    ranks[1]._host.slots[0, 3] ^= 1  # of the other rank
    load = a_plan((a_load(1, (4, 5), (0, 1), True),), stores_done=1)
    said = [step(rank, load) for rank in ranks]
    assert [result.mismatches for result in said] == [1, 0]


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("late", [False, True])
def test_bytes_that_change_on_any_rank_are_a_miss(
    wrong: int, late: bool, open_ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever rank the engine gets the result of, it hears of that before it hears of the end."""
    ranks = open_ranks(monkeypatch, common=False, late=late)
    for rank in ranks:
        step(rank, a_plan(store=a_store(1, (1, 2, 3), (0, 1, 2))))
        rank.drain()
    ranks[wrong]._host.slots[0, 3] ^= 1
    loads = a_load(1, (4,), (0,), True), a_load(2, (5,), (1,), True)
    said = [step(rank, a_plan(loads, stores_done=1)) for rank in ranks]
    for _ in range(LateQueue.patience + 2):
        said += [step(rank) for rank in ranks]
    assert said[-1].done_on(LOAD) == said[-2].done_on(LOAD) == 1, "it is held back at the first"
    for result in said:
        if result.done_on(LOAD) == 1:
            assert result.failed == (Failure(LOAD, 1, MISMATCH),)
    told = [step(rank, a_plan(loads_done=1, stores_done=1)) for _ in (1, 2) for rank in ranks]
    assert [(one.done_on(LOAD), one.failed) for one in told[2:]] == [(2, ())] * 2


def test_a_rank_does_not_stay_at_what_has_failed_while_it_was_drained(
    open_ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a reset: the engine takes all for done then, and no plan follows for what failed."""
    ranks = open_ranks(monkeypatch, common=False, late=True)
    for rank in ranks:
        step(rank, a_plan(store=a_store(1, (1, 2, 3), (0, 1, 2))))
        rank.drain()
    ranks[1]._host.slots[0, 3] ^= 1
    for rank in ranks:
        step(rank, a_plan((a_load(1, (4,), (0,), True),), stores_done=1))
    assert [rank.drain() for rank in ranks] == [True, False]
    for rank in ranks:
        step(rank, a_plan((a_load(2, (5,), (1,), True),), loads_done=1, stores_done=1))
    said = [step(rank) for _ in range(LateQueue.patience + 2) for rank in ranks]
    assert (said[-1].done_on(LOAD), said[-1].failed) == (2, ())


@pytest.mark.parametrize("integrity", ["sample", "off"])
def test_without_checksums_a_rank_that_is_behind_is_not_waited_for(
    integrity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream waits, and the host goes on: nothing is found out when the load is done."""
    monkeypatch.setattr(copy_engine, "SyncCopyQueue", LateQueue)
    monkeypatch.setattr(
        copy_engine.CopyEngine, "wait_done", lambda self, known: waited.append(known)
    )
    waited: list[Any] = []
    rank = RankTier(small_runner(tensor_parallel_size=2), 8, alone=False, integrity=integrity)
    step(rank, a_plan(store=a_store(1, (1, 2), (0, 1))))
    rank.drain()
    step(rank, a_plan((a_load(1, (4, 5), (0, 1)),), stores_done=1))
    step(rank, a_plan(loads_done=1, wait_load=1, promised_loads=[1]))
    assert waited == ([[(LOAD, 1)]] if integrity == "sample" else [])
    rank.close()


def test_no_rank_has_a_checksum_of_what_was_stored_to_prove_a_round_trip(
    open_ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be compared with what another rank stores to that slot."""
    for rank in open_ranks(monkeypatch, slots=64):
        assert not rank._checksums.sums.any()


def test_slots_in_common_take_their_memory_once(
    open_ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = open_ranks(monkeypatch, slots=4096)
    assert [rank.num_ready for rank in ranks] == [4096, 4096]
    assert ranks[0]._host.slots.data_ptr() != ranks[1]._host.slots.data_ptr()
    ranks[0]._host.slots[4095, 0] = 9
    assert ranks[1]._host.slots[4095, 0] == 9


def test_ranks_take_turns_at_proving_a_round_trip(
    open_ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both prove it with the same slot: one that is at it keeps the other out."""
    import threading

    first, second = open_ranks(monkeypatch)
    entered: list[float] = []

    def other() -> None:
        with second._host.quiet():
            entered.append(time.monotonic())

    thread = threading.Thread(target=other)
    with first._host.quiet():
        thread.start()
        time.sleep(0.2)
        left = time.monotonic()
    thread.join(20)
    assert entered and entered[0] >= left
