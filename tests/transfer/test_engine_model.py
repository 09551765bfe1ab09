"""`CopyEngine` carries out the plans of a real tier on streams that run beside each other.

Its queues are the real ones on the streams of a `FakeCuda`, whose work is done in random order as
far as the engine's waits allow, and a copy is enqueued slice by slice when nobody waits for it. A
wait that is missing shows as bytes that are wrong.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from tier.tier_machine import TierMachine
from tier.tier_traffic import Traffic
from transfer.engine_rank import EngineRank


class EngineMachine(TierMachine):
    """The tier's random steps, with engines on the ranks."""

    new_rank = EngineRank


EngineMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestEngine = EngineMachine.TestCase


@pytest.mark.parametrize("seed", range(15))
def test_heavy_traffic_loads_what_was_stored(seed: int) -> None:
    Traffic(EngineMachine(), seed).run(steps=300)
