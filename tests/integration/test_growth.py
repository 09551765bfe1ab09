"""How far the tier grows with one rank, and with several that are not alike."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload_patch.integration import growth
from kvoffload_patch.integration.growth import AgreedGrowth
from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.plan import TransferResult


class Ranks:
    """``num_ranks`` ranks, of which the slowest has ``slowest`` slots."""

    def __init__(self, num_ranks: int, slowest: int = 0) -> None:
        self.num_ranks = num_ranks
        self.slowest = slowest
        self.growing = True
        self.asked = 0

    def num_ready(self) -> tuple[int, bool]:
        self.asked += 1
        return self.slowest, self.growing


def tier_with(used: int, num_slots: int = 8) -> OffloadManager:
    tier = OffloadManager(num_slots)
    for i in range(used):
        tier.queue_store(("key", i), i)
    tier.make_plan(lambda block, key: True)
    tier.apply(tier.drained())
    return tier


def result(num_slots: int | None, **more: Any) -> TransferResult:
    return TransferResult(3, 5, num_slots=num_slots, **more)


def test_one_rank_speaks_for_itself() -> None:
    ranks = Ranks(1)
    agreed = AgreedGrowth(tier_with(0), ranks).agreed  # type: ignore[arg-type]
    assert agreed(result(20)) == result(20)
    assert agreed(result(None)) == result(None)
    assert ranks.asked == 0


@pytest.mark.parametrize("slowest", [8, 11, 30])
def test_of_several_ranks_the_one_with_the_fewest_counts(slowest: int) -> None:
    ranks = Ranks(2, slowest)
    tier = tier_with(6)
    agreed = AgreedGrowth(tier, ranks).agreed(result(20, failed_loads=(2,)))  # type: ignore[arg-type]
    assert agreed == result(min(slowest, 20), failed_loads=(2,), growing=True)
    tier.apply(agreed)
    assert tier.num_slots == min(slowest, 20)


@pytest.mark.parametrize(("used", "num_slots"), [(5, 20), (8, 8), (8, 4), (8, None)])
def test_ranks_are_not_asked_while_there_is_room_or_nothing_new(
    used: int, num_slots: int | None
) -> None:
    ranks = Ranks(2, 20)
    tier = tier_with(used)
    tier.apply(AgreedGrowth(tier, ranks).agreed(result(num_slots)))  # type: ignore[arg-type]
    assert (ranks.asked, tier.num_slots) == (0, 8)


def test_ranks_are_not_asked_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(growth.time, "monotonic", lambda: now[0])
    ranks = Ranks(2, 8)
    agreed = AgreedGrowth(tier_with(8), ranks).agreed  # type: ignore[arg-type]
    assert [agreed(result(20)).num_slots for _ in range(3)] == [8, None, None]
    assert ranks.asked == 1
    now[0] += 1.0
    ranks.slowest = 12
    assert agreed(result(20)).num_slots == 12


def test_nobody_is_asked_any_more_once_no_rank_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(growth.time, "monotonic", lambda: now[0])
    ranks, tier = Ranks(2, 10), tier_with(8)
    agreed = AgreedGrowth(tier, ranks).agreed  # type: ignore[arg-type]
    ranks.growing = False
    found = agreed(result(20, growing=True))
    assert (found.num_slots, found.growing) == (10, False)
    tier.apply(found)
    now[0] += 100.0
    assert agreed(result(20)).num_slots is None, "one rank has ten for good"
    assert ranks.asked == 1
