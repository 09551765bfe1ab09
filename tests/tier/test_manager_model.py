"""`OffloadManager` in random steps, beside a model of its state and two ranks that lag behind."""

from __future__ import annotations

import pytest
from hypothesis import settings
from tier.tier_machine import TierMachine, Traffic

TierMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestTier = TierMachine.TestCase


@pytest.mark.parametrize("seed", range(15))
def test_heavy_traffic_loads_what_was_stored(seed: int) -> None:
    Traffic(TierMachine(), seed).run(steps=300)


def test_a_rank_that_is_behind_does_not_overwrite_a_block_that_it_has_still_to_store() -> None:
    machine = TierMachine()
    machine.start(capacity=4)
    machine.compute_blocks([(0, 0)], queued=False)
    machine.end_step()
    machine.rank_catches_up(which=0, favourite=0, eager=True)
    machine.take_in_the_result()  # the first rank has done the store; the second has not begun
    machine.compute_blocks([(0, 1)], queued=False)
    machine.drain(favourite=0, eager=True)
