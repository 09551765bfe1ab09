"""Whatever function of the tier raises, wherever it is called: vLLM does not hear of it."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from integration.engine.random_faults import functions, run, run_elastic
from integration.engine.random_runs import most_in_flight

from kvoffload_patch.integration.install import release_in_use

SEEDS = range(160)
SPLIT = 4  # of SEEDS
MOST = most_in_flight(release_in_use())


@pytest.mark.parametrize("part", range(SPLIT))
def test_the_engine_serves_on_whatever_raises(part: int) -> None:
    failed = set()
    for seed in SEEDS[part::SPLIT]:
        try:
            failed.add(run(seed, MOST))
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    assert len(failed) > 5, failed


def test_a_tier_that_fails_when_weights_are_updated_is_asked_nothing_any_more() -> None:
    assert run(50299, MOST) == "HeldSlots.forget"


def test_an_engine_beside_kvcached_serves_on_whatever_raises() -> None:
    failed = set()
    # In the first, what fails once a plan was made had lost its loads.
    for seed in (181, 198, 846, *range(37)):
        try:
            failed.add(run_elastic(seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    assert len(failed) > 5, failed


def test_what_may_raise_is_most_of_the_tier() -> None:
    found = {f"{kind.__name__}.{name}" for kind, name in functions()}
    assert len(found) > 300
    assert {"LoadBook.finish", "KVEvents.cached", "StoreChoice.note_answers"} < found
