"""What this package's rules store and refresh."""

from __future__ import annotations

from tier.plans import a_result, store_of

from scripts.simulate.model import Machine, Model
from scripts.simulate.rules import NoTier, Rules, Run
from scripts.simulate.trace import Request
from scripts.simulate.workloads import generate


def hit_on_gpu(*keys: int) -> Run:
    return Run(
        0, Request(0.0, 4 * len(keys) + 1, 1, keys), [0, 1, 2], len(keys), len(keys), 0, 0, 0
    )


def test_a_hit_on_the_gpu_refreshes_the_copy_and_stores_what_is_lost() -> None:
    rules = Rules(2)
    manager = rules.manager
    manager.make_plan(lambda *_: True, {1: 0, 2: 1})
    manager.apply(a_result(0, 1))
    rules.admitted(hit_on_gpu(2, 3))
    plan = manager.make_plan(lambda *_: True)
    assert store_of(plan).source_ids == (1,), "3 was lost"
    assert manager.holds(2)
    assert not manager.holds(1), "2 was used"


def test_all_that_is_computed_is_stored() -> None:
    run = hit_on_gpu(1, 2)
    assert Rules(2).computed(run, (7, 8), (3, 4)) == {7: 3, 8: 4}
    assert NoTier().computed(run, (7, 8), (3, 4)) == {}
    rules = Rules(2)
    rules.answered(run, 9, 5)
    assert store_of(rules.manager.make_plan(lambda *_: True)).source_ids == (5,)


def test_lru_holds_no_block_whose_prefix_is_gone_once_requests_have_ended() -> None:
    machine = Machine(gpu_blocks=400, cpu_blocks=1200)
    trace, rules = generate("chat", seconds=600), Rules(machine.cpu_blocks)
    Model(machine, rules, trace).run()
    holds = [[rules.manager.holds(key) for key in request.keys] for request in trace]
    assert rules.manager.stats.evicted > 1000
    assert [each for each in holds if each != sorted(each, reverse=True)] == []


def test_blocks_are_stored_before_they_are_handed_out_and_copies_leave_first() -> None:
    machine = Machine(gpu_blocks=400, cpu_blocks=600)
    trace = generate("chat", seconds=400)
    found, lost = {}, {}
    for store in ("eager", "lazy", "auto"):
        rules = Rules(machine.cpu_blocks, store=store, ahead=50)
        found[store] = Model(machine, rules, trace).run()
        lost[store] = rules.manager.stats.overwritten
    assert found["auto"].again < 0.9 * found["eager"].again
    assert found["lazy"].again < 0.9 * found["eager"].again
    assert max(lost.values()) < 0.01 * found["lazy"].stored
