"""Ranks that hold the same bytes: one copy for all of them where that is safe, a line if not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvoffload_patch import __version__  # noqa: E402
from kvoffload_patch.integration.engine.ranks import workers as ranks_module  # noqa: E402
from kvoffload_patch.integration.engine.ranks.workers import RankGroup  # noqa: E402
from kvoffload_patch.integration.errors import TierRefused  # noqa: E402
from kvoffload_patch.integration.protocol import RankGeometry, RankOpened  # noqa: E402
from kvoffload_patch.integration.slot_counts import SlotCounts  # noqa: E402

GIB = 1 << 30
ALIKE = {"same_bytes": "stage 0, part 0 of 1"}


def geometry(rank: int, host: str = "a", slot_bytes: int = 1024, **more: Any) -> RankGeometry:
    given = {"block_bytes": 100, "num_blocks": 7, "device": "cuda", "available_bytes": 2 * GIB}
    given["version"] = __version__
    return RankGeometry(rank, host, 1000 + rank, slot_bytes=slot_bytes, **{**given, **more})


class Executor:
    """Answers for its ranks, and notes what it was asked."""

    def __init__(self, ranks: list[RankGeometry], reached: list[tuple[bool, bool]]) -> None:
        self.answers: dict[str, list[Any]] = {
            "describe_rank": [dataclasses.replace(r, of_ranks=len(ranks)) for r in ranks],
            "can_share": reached,
            "open_rank": [RankOpened(r.rank, r.pid, 9) for r in ranks],
            "drain_rank": [None for _ in ranks],
            "wipe_rank": [None for _ in ranks],
            "resize_rank": [(6, False) for _ in ranks],
        }
        self.calls: list[tuple[Any, ...]] = []

    def collective_rpc(self, function: Any, timeout: float, args: tuple[Any, ...]) -> Any:
        self.calls.append((function.__name__, *args))
        return [(True, answer) for answer in self.answers[function.__name__]]


def two(**how: Any) -> Executor:
    return Executor([geometry(rank, **how) for rank in (0, 1)], [(True, True)] * 2)


def test_ranks_with_the_same_bytes_have_twice_the_slots() -> None:
    apart, together = two(), two(**ALIKE)
    groups = [RankGroup(apart), RankGroup(together)]
    for group in groups:
        group.open(1024 * 40)
    assert [group.num_slots for group in groups] == [20, 40]
    assert [group.slot_bytes for group in groups] == [2048, 1024]
    assert [group.block_bytes for group in groups] == [200, 100]
    assert [group.sharing for group in groups] == [1, 2]
    assert groups[1].size.endswith(", one copy for ranks that hold the same bytes (0 and 1)")
    asked, opened = together.calls[-2:]
    assert asked[-1] == opened[-3] and [a.ranks for a in opened[-3]] == [(0, 1)]
    assert not opened[-3][0].is_reachable(), "the engine has closed it"
    assert apart.calls[-1][-3] == []


def test_slots_in_common_are_checked_against_memory_once() -> None:
    mib = 1 << 20
    RankGroup(two(**ALIKE, slot_bytes=mib)).open(GIB)
    with pytest.raises(TierRefused, match="would take 1.0 GiB on a"):
        RankGroup(two(**ALIKE, slot_bytes=mib)).open(GIB + mib)
    ranks = RankGroup(two(**ALIKE, slot_bytes=mib))
    ranks.open(mib)
    ranks.check_room(1024)
    with pytest.raises(TierRefused, match="expected 2.0 GiB available on a"):
        ranks.check_room(1025)


@pytest.mark.parametrize(
    ("hosts", "reached", "integrity", "why"),
    [
        ("aa", [(True, True), (True, True)], "full", "KVOFFLOAD_INTEGRITY=full has checksums"),
        ("aa", [(True, True), (True, False)], "sample", "cannot map memory of this engine"),
        ("aab", [(True, True), (True, True), (False, True)], "off", "share no memory to tell"),
        ("ab", [(True, True), (True, True)], "off", "ranks on 2 hosts hold the same bytes"),
    ],
)
def test_ranks_that_cannot_share_keep_a_copy_each_and_say_so(
    hosts: str, reached: list[Any], integrity: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(ranks_module.logger, "info", lambda text, *a: said.append(text % a))
    executor = Executor([geometry(r, h, **ALIKE) for r, h in enumerate(hosts)], reached)
    ranks = RankGroup(executor)
    ranks.open(1024 * len(hosts) * 5, integrity=integrity)
    assert ranks.num_slots == 5 and executor.calls[-1][-3] == []
    assert why in said[-1]
    assert ["ranks on 2 hosts" in text for text in said].count(True) == len(set(hosts)) - 1


@pytest.mark.parametrize(
    ("ranks", "reached", "told"),
    [
        ([geometry(0)], [(True, True)], True),
        ([geometry(0), geometry(1)], [(True, True), (True, True)], True),
        ([geometry(0), geometry(1)], [(True, True), (False, True)], False),
    ],
)
def test_one_rank_tells_of_all_where_they_share_memory(
    ranks: list[Any], reached: list[Any], told: bool
) -> None:
    executor = Executor(ranks, reached)
    group = RankGroup(executor)
    group.open(1024 * 20)
    assert group.told_of_all == told


def test_before_slots_in_common_are_given_back_or_wiped_no_rank_has_a_copy_under_way() -> None:
    executor = two(**ALIKE)
    ranks = RankGroup(executor)
    ranks.open(1024 * 20)
    ranks.resize(6, 1)
    ranks.wipe()
    found = [call[0] for call in executor.calls[-4:]]
    assert found == ["drain_rank", "resize_rank", "drain_rank", "wipe_rank"]
    alone = two()
    ranks = RankGroup(alone)
    ranks.open(2048 * 20)
    ranks.resize(6, 1)
    ranks.wipe()
    assert "drain_rank" not in [call[0] for call in alone.calls]


def test_a_system_without_such_memory_keeps_a_copy_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(ranks_module.SharedFile, "__init__", missing)
    executor = two(**ALIKE)
    ranks = RankGroup(executor)
    ranks.open(1024 * 20)
    assert ranks.num_slots == 10 and executor.calls[-1][-3] == []


def test_the_engine_hears_of_a_step_that_failed_on_a_rank_that_reports_nothing() -> None:
    executor = two()
    group = RankGroup(executor)
    assert group.step_failure() == ""
    found: list[SlotCounts] = []
    answer = executor.collective_rpc

    def collective_rpc(function: Any, timeout: float, args: tuple[Any, ...]) -> Any:
        if function.__name__ == "open_rank":
            found.extend(SlotCounts(args[3], rank) for rank in (0, 1))
        return answer(function, timeout, args)

    executor.collective_rpc = collective_rpc  # type: ignore[method-assign]
    group.open(1024 * 40, integrity="sample")
    assert group.step_failure() == ""
    found[1].ring()
    said = group.step_failure()
    assert said.startswith("kvoffload_patch: expected rank 1 to carry out its part of each step")


def test_nobody_looks_where_ranks_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(ranks_module, "Alarms", made.append)
    for reached in (True, False):
        executor = Executor([geometry(rank) for rank in (0, 1)], [(True, True), (reached, True)])
        RankGroup(executor).open(1024 * 40)
    assert len(made) == 1, "of the first alone"


@pytest.mark.parametrize("maps", [True, False])
def test_ranks_say_nothing_in_memory_that_the_engine_does_not_see(
    monkeypatch: pytest.MonkeyPatch, maps: bool
) -> None:
    """They raise then. What they say and do not raise would be lost."""

    def alarms(board: object) -> object:
        if maps:
            return board
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(ranks_module, "Alarms", alarms)
    executor = Executor([geometry(rank) for rank in (0, 1)], [(True, True), (True, True)])
    boards: list[object] = []
    as_made = executor.collective_rpc

    def collective_rpc(method: Any, timeout: Any = None, args: Any = ()) -> Any:
        if len(args) > 3:
            boards.append(args[3])
        return as_made(method, timeout, args)

    executor.collective_rpc = collective_rpc  # type: ignore[method-assign]
    RankGroup(executor).open(1024 * 40)
    assert [board is not None for board in boards] == [maps]
