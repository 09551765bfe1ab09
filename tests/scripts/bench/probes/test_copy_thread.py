"""The probe of what enqueuing copies costs a step plays each of its kinds of steps."""

from __future__ import annotations

import time

import pytest

from kvoffload_patch.links import STORE
from scripts.bench.probes.copy_thread import KINDS, Steps


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_step_has_its_copies_done(kind: str) -> None:
    steps = Steps(*KINDS[kind])
    try:
        for _ in range(3):
            assert steps.step() > 0
        end = time.monotonic() + 20
        while steps._engine.poll().done_on(STORE) < 3:
            assert time.monotonic() < end
    finally:
        steps.close()
