"""`OffloadManager` in random steps, beside a model of its state and two ranks that lag behind."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from tier.strict import Strict
from tier.tier_machine import TierMachine
from tier.tier_traffic import Traffic

from kvoffload_patch.config import STORES
from kvoffload_patch.tier import queues, state
from kvoffload_patch.tier.policies import POLICIES

KINDS = list(product(POLICIES, STORES))


@pytest.fixture(autouse=True)
def no_run_is_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are short here, and their keys are to be found by their neighbours all the same.

    Nor is a run long enough to fill a plan of many steps.
    """
    monkeypatch.setattr(state, "NEIGHBOUR_BLOCKS", 1)
    monkeypatch.setattr(queues, "TOGETHER_BLOCKS", 3)
    monkeypatch.setattr(queues, "TOGETHER_STEPS", 3)


def machine_of(eviction: str, store: str) -> type[TierMachine]:
    """The same machine with other policies."""
    return type(f"{eviction}_{store}", (TierMachine,), {"eviction": eviction, "store": store})


@pytest.mark.parametrize(("eviction", "store"), KINDS)
def test_random_steps(eviction: str, store: str) -> None:
    examples = 120 if (eviction, store) in (("lru", "eager"), ("arc", "auto")) else 40
    run_state_machine_as_test(
        machine_of(eviction, store),
        settings=settings(max_examples=examples, stateful_step_count=60, deadline=None),
    )


@pytest.mark.parametrize("store", STORES)
def test_a_policy_is_told_of_slots_what_its_protocol_allows(store: str) -> None:
    kind = machine_of("strict", store)
    kind.policies = {"strict": Strict}
    run_state_machine_as_test(
        kind, settings=settings(max_examples=70, stateful_step_count=60, deadline=None)
    )


@pytest.mark.parametrize(("eviction", "store"), KINDS)
@pytest.mark.parametrize("seed", range(10))
def test_heavy_traffic_loads_what_was_stored(seed: int, eviction: str, store: str) -> None:
    Traffic(machine_of(eviction, store)(), seed).run(steps=200)


def test_a_rank_that_is_behind_does_not_overwrite_a_block_that_it_has_still_to_store() -> None:
    machine = TierMachine()
    machine.start(capacity=4)
    machine.compute_blocks([(0, 0)], queued=False)
    machine.end_step()
    machine.rank_catches_up(which=0, favourite=0, eager=True)
    machine.take_in_the_result()  # the first rank has done the store; the second has not begun
    machine.compute_blocks([(0, 1)], queued=False)
    machine.drain(favourite=0, eager=True)
