"""A trace that is worked out by hand, and what must hold of every replay."""

from __future__ import annotations

import pytest

from kvoffload_patch.links import LOAD
from scripts.simulate.model import Figures, Machine, Model
from scripts.simulate.rules import NoTier, Rules
from scripts.simulate.sides import SIDES
from scripts.simulate.trace import Request
from scripts.simulate.workloads import generate

# A block is 4 tokens of 1 byte; a prompt's block takes 1 s, the bus takes 0.5 s a block each way.
MACHINE = Machine(
    gpu_blocks=4, cpu_blocks=8, block_tokens=4, token_bytes=1, load_gbs=8e-9, store_gbs=8e-9,
    prefill=4.0, token_s=1.0, step_tokens=8,
)  # fmt: skip


def run(rules: Rules, *trace: Request, machine: Machine = MACHINE) -> Figures:
    return Model(machine, rules, trace).run()


THREE = (
    Request(0.0, 9, 2, (1, 2)),  # 3 blocks
    Request(10.0, 9, 2, (3, 4)),  # takes the free block, and blocks of the first, tail first
    Request(20.0, 9, 2, (1, 2)),
)


def test_three_requests_without_a_tier() -> None:
    found = run(NoTier(), *THREE)
    # The second takes four blocks less one: the empty one, the first's third, and key 2's.
    assert (found.reusable, found.hits_gpu, found.hits_tier, found.again) == (2, 1, 0, 1)
    # 8 tokens in one step, 1 in the next; the third's 4 and 1 in one.
    assert found.first_token == pytest.approx([2.25, 2.25, 1.25])
    assert found.end == pytest.approx(23.25), "and 2 s for the answer"
    assert (found.stored, found.loaded, found.evicted) == (0, 0, 0)


def test_three_requests_with_the_tier() -> None:
    found = run(Rules(8), *THREE)
    assert (found.reusable, found.hits_gpu, found.hits_tier, found.again) == (2, 1, 1, 0)
    assert found.first_token == pytest.approx([2.25, 2.25, 0.75]), "0.5 s of load, 1 token"
    assert (found.stored, found.loaded) == (4, 1)


def test_a_step_waits_for_the_store_of_a_block_that_it_overwrites() -> None:
    slow = MACHINE._replace(store_gbs=4e-10)  # 10 s a block
    two = Request(0.0, 12, 1, (1, 2, 3)), Request(6.0, 12, 1, (4, 5, 6))
    found = run(Rules(8), *two, machine=slow)
    # The first step stores two blocks, until 2 + 20, then the second one until 32. At 6 s the
    # other request overwrites three blocks of the first, and its first step waits until then.
    assert found.first_token == pytest.approx([3.0, 26 + 3])


def test_who_hits_a_block_that_is_being_loaded_waits_for_it() -> None:
    slow = MACHINE._replace(load_gbs=8e-10)  # 5 s a block
    again = Request(20.5, 9, 2, (1, 2))
    found = run(Rules(8), *THREE, again, machine=slow._replace(gpu_blocks=6))
    assert (found.hits_gpu, found.hits_tier) == (4, 0), "room for all"
    model = Model(slow, Rules(8), [*THREE, Request(20.5, 9, 2, (1, 2))])
    found = model.run()
    assert found.loaded == 1
    assert found.first_token[2:] == pytest.approx([5.5, 5.0]), "a step of 2 tokens, at 25 s"


def test_an_answer_is_found_by_the_request_that_goes_on_from_it() -> None:
    found = run(Rules(8), Request(0.0, 4, 4, (1, 2)), Request(9.0, 9, 1, (1, 2)))
    assert (found.reusable, found.hits_gpu) == (2, 2)


@pytest.mark.parametrize("side", SIDES)
def test_a_preempted_request_begins_again(side: str) -> None:
    machine = MACHINE._replace(preempt=True)
    two = Request(0.0, 7, 8, (1, 2, 3)), Request(0.0, 7, 8, (4, 5, 6))
    found = run(SIDES[side].rules(machine), *two, machine=machine)
    assert found.preempted >= 1
    assert len(found.first_token) == 2
    reserved = run(SIDES[side].rules(MACHINE), *two)
    assert reserved.preempted == 0


def test_a_request_that_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 5 GPU blocks or more, found 4"):
        Model(MACHINE, NoTier(), [Request(0.0, 17, 1, (1, 2, 3, 4))])


@pytest.mark.parametrize("preempt", [False, True])
@pytest.mark.parametrize("side", SIDES)
def test_what_every_replay_keeps(side: str, preempt: bool) -> None:
    machine = Machine(gpu_blocks=120, cpu_blocks=240, prefill=20_000, preempt=preempt)
    trace = generate("mix", seconds=60)
    rules = SIDES[side].rules(machine)
    model = Model(machine, rules, trace)
    told: list[int] = []
    found = model.run(told.append)
    assert found.hits_gpu + found.hits_tier + found.again == found.reusable > 100
    assert told[-1] == 0
    assert len(found.first_token) == len(trace)
    assert min(found.first_token) > 0
    assert found.stored <= rules.manager.stats.stored + rules.manager.num_slots
    assert found.loaded >= found.hits_tier >= rules.manager.stats.loaded * (not preempt)
    assert len(model._gpu.free) == 120, "every block came back"
    assert rules.manager.drained().done_on(LOAD) == model._bus.result(1e9).done_on(LOAD)
