"""`OffloadManager` in random steps, beside a model of its state and two ranks that lag behind."""

from __future__ import annotations

import pytest
from hypothesis import settings
from tier.tier_machine import TierMachine, Traffic

from kvoffload_patch.config import EVICTIONS
from kvoffload_patch.tier.policies import POLICIES


class ArcMachine(TierMachine):
    """The same with the policy that is the default."""

    eviction = "arc"


MACHINES = {machine.eviction: machine for machine in (TierMachine, ArcMachine)}
SETTINGS = settings(max_examples=200, stateful_step_count=60, deadline=None)
TierMachine.TestCase.settings = ArcMachine.TestCase.settings = SETTINGS
TestTier = TierMachine.TestCase
TestArc = ArcMachine.TestCase


def test_every_policy_is_tested_here() -> None:
    assert set(POLICIES) == set(MACHINES) == set(EVICTIONS)


@pytest.mark.parametrize("eviction", MACHINES)
@pytest.mark.parametrize("seed", range(15))
def test_heavy_traffic_loads_what_was_stored(seed: int, eviction: str) -> None:
    Traffic(MACHINES[eviction](), seed).run(steps=300)


def test_a_rank_that_is_behind_does_not_overwrite_a_block_that_it_has_still_to_store() -> None:
    machine = TierMachine()
    machine.start(capacity=4)
    machine.compute_blocks([(0, 0)], queued=False)
    machine.end_step()
    machine.rank_catches_up(which=0, favourite=0, eager=True)
    machine.take_in_the_result()  # the first rank has done the store; the second has not begun
    machine.compute_blocks([(0, 1)], queued=False)
    machine.drain(favourite=0, eager=True)
