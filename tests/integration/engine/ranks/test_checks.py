"""Which ranks can take part together, and whether their hosts have room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvoffload_patch import __version__
from kvoffload_patch.integration.engine.ranks.checks import (
    by_host,
    check_size,
    check_together,
    refuse_errors,
)
from kvoffload_patch.integration.errors import TierRefused
from kvoffload_patch.integration.protocol import RankGeometry, RankOpened

GIB = 1 << 30


def geometry(rank: int, host: str = "a", **more: Any) -> RankGeometry:
    given = {"slot_bytes": 512, "num_blocks": 7, "device": "cuda", "of_ranks": 2}
    given |= {"available_bytes": 2 * GIB, "version": __version__}
    return RankGeometry(rank, host, 1000 + rank, **{**given, **more})


def test_ranks_of_one_engine_take_part() -> None:
    check_together([geometry(0), geometry(1)])
    check_together([geometry(5, of_ranks=1)])


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (
            {"version": "0.0.1"},
            rf"expected kvoffload_patch {__version__} wherever a worker runs, found 0.0.1 for rank "
            r"1 on b; install the same version on every host\.$",
        ),
        ({"error": "it did not see it"}, r"rank 1 \(pid 1001 on b\) cannot take part: it did not"),
        ({"num_blocks": 8}, "the same KV blocks on every rank, found rank 0: 7 on cuda, rank 1: 8"),
        ({"device": "cpu"}, "same KV blocks on every rank, found rank 0: 7 on cuda, rank 1: 7 on"),
        ({"of_ranks": 4}, "one scheduler for all 4 ranks .* found one that has 2 of them"),
    ],
)
def test_ranks_that_one_plan_does_not_fit_are_refused(second: dict[str, Any], text: str) -> None:
    with pytest.raises(TierRefused, match=text):
        check_together([geometry(0), geometry(1, "b", **second)])


@pytest.mark.parametrize("number", [0, 1])
def test_a_scheduler_that_has_one_of_several_ranks_is_refused(
    number: int, record_property: Callable[[str, object], None]
) -> None:
    """Each such scheduler must decide as the others do, and copies are done when they are done."""
    with pytest.raises(TierRefused, match="external_launcher; use the executor mp or ray") as said:
        check_together([geometry(number)])
    record_property("refusal", str(said.value))  # for docs/features.md


def test_each_rank_that_answers_with_an_error_is_named() -> None:
    opened = [RankOpened(0, 1), RankOpened(1, 2, error="no room"), RankOpened(2, 3, error="late")]
    with pytest.raises(TierRefused, match=r"^rank 1 \(pid 2\) fails: no room; rank 2 \(pid 3\) f"):
        refuse_errors(opened, "fails")
    refuse_errors(opened[:1], "fails")


def test_a_host_has_room_for_all_of_its_ranks_beside_what_stays_free() -> None:
    ranks = [geometry(0), geometry(1), geometry(2, "b", available_bytes=GIB + 512 * 9)]
    hosts = by_host(ranks)
    assert {host: [r.rank for r in members] for host, members in hosts.items()} == {
        "a": [0, 1],
        "b": [2],
    }
    check_size(hosts, 1536 * 9, 9, 1536)
    with pytest.raises(TierRefused, match=r"would take 0\.0 GiB on b, where 0\.0 GiB fit: 1\.0"):
        check_size(hosts, 1536 * 10, 10, 1536)
    for room, fits in ((GIB + 511, r"0\.0 GiB fit: 1\.0"), (GIB // 2, r"0\.0 GiB fit: 0\.5")):
        full = by_host([geometry(0, available_bytes=room)])
        with pytest.raises(TierRefused, match=rf"{fits} .* or free memory"):
            check_size(full, None, 0, 512)
    with pytest.raises(TierRefused, match="to hold at least one block .* found 9.31e-10"):
        check_size(hosts, 1, 0, 1536)
