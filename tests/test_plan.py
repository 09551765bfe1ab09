"""A plan by link, and the way it takes to a worker."""

from __future__ import annotations

import pickle

from kvoffload_patch.links import CPU, LATE, LOAD, STORE, Failure
from kvoffload_patch.plan import Transfer, TransferPlan, TransferResult


def test_waits_and_what_is_done_are_by_link_and_0_where_there_is_none() -> None:
    plan = TransferPlan(waits=((LOAD, 3),), done=((STORE, 8), (LOAD, 2)))
    assert (plan.waits_for(LOAD), plan.waits_for(STORE)) == (3, 0)
    assert (plan.known_done(LOAD), plan.known_done(STORE)) == (2, 8)
    empty = TransferPlan()
    assert (empty.waits_for(LOAD), empty.known_done(LOAD), empty.before) == (0, 0, ())


def test_results_are_read_by_link() -> None:
    failed = [Failure(*one, LATE) for one in ((LOAD, 4), (STORE, 1), (LOAD, 5))]
    result = TransferResult(((LOAD, 5), (STORE, 2)), tuple(failed))
    assert (result.done_on(LOAD), result.done_on(STORE)) == (5, 2)
    assert (result.failed_on(LOAD), result.failed_on(STORE)) == ((4, 5), (1,))
    assert (result.done_on(("disk", CPU)), result.failed_on(("disk", CPU))) == (0, ())


def test_plans_and_results_come_out_of_a_pickle_as_they_went_in() -> None:
    load = Transfer(1, *LOAD, source_ids=(5, 6), target_ids=(2, 9))
    plan = TransferPlan((load,), (), ((LOAD, 1),), ((STORE, 4),), ((LOAD, 1),))
    result = TransferResult(((LOAD, 1),), (Failure(LOAD, 1, LATE),), 40, growing=True)
    for sent in (plan, result):
        received = pickle.loads(pickle.dumps(sent))
        assert received == sent and type(received) is type(sent)
    assert (load.source, load.target) == LOAD
