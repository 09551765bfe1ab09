"""The kernels in numpy, which long runs use, do what the kernels on Triton's interpreter do."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transfer import plain_kernels
from transfer.layouts import LAYOUTS, build
from transfer.opened import Opened, round_trip
from transfer.traffic import Machine, Traffic

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_the_same_traffic_leaves_the_same_bytes_and_checksums(groups: int, checked: bool) -> None:
    """Also where a bit changes in a slot: the same loads fail."""
    first, second = (traffic_on(plain, groups, checked) for plain in (False, True))
    assert first == second
    assert bool(first["failed"]) == checked


def traffic_on(plain: bool, groups: int, checked: bool) -> dict[str, Any]:
    """What a rank has after some steps."""
    with plain_kernels.used() if plain else nullcontext():
        rank = Machine("fake", "staged", seed=3, checked=checked, groups=groups)
        traffic = Traffic([rank], seed=3)
        while traffic.moves < 60:
            traffic.step()
            for _ in range(3):
                rank.flip()
        wrong = rank.wrong()
        checksums = rank.backend.checksums
        found = {
            "rows": [row.tolist() for row in rank.layout.rows],
            "slots": rank.host.slots.tolist(),
            "failed": sorted(rank.failed),
            "wrong": wrong,
            "sums": checksums.sums.tolist() if checksums is not None else None,
        }
        rank.close()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_of_every_layout_come_back(layout: str) -> None:
    with plain_kernels.used():
        opened = Opened(build(layout), "groups", "cpu", pad=3, per_piece=3)
        round_trip(opened, [5, 0, 3], [8, 2, 3], [1, 6, 2])
        opened.close()
