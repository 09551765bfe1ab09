"""Queues, order and status, over vLLM's own classes and for both generations of its queues."""

from __future__ import annotations

import heapq
import random
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload_patch.integration.engine.adapters.vllm_scheduler import (
    SchedulerView,
    _heap_order,
    _resumed,
)

pytest.importorskip("vllm")

from integration.engine.world import BLOCK, FakeScheduler, make_manager, make_request, prompt
from scheduler_half.scenarios import demand_of_running
from vllm.v1.request import RequestStatus

HOLDING = ["skipped_waiting", "kv_holding_waiting"]  # 0.26 to 0.30, and from 0.31 on


class Counted:
    """An item that counts comparisons."""

    compared = 0

    def __init__(self, value: int) -> None:
        self.value = value

    def __lt__(self, other: Counted) -> bool:
        Counted.compared += 1
        return self.value < other.value


def make_view(**scheduler: Any) -> SchedulerView:
    """A view of a scheduler with nothing in its queues."""
    return SchedulerView(FakeScheduler(make_manager(9), **scheduler))


def test_what_begins_again_in_a_step_is_known_in_every_release() -> None:
    """Without it, a prompt that is computed again would be reckoned as a decode."""
    again = {"a": False, "b": True, "c": True}
    assert [*_resumed(SimpleNamespace(resumed_req_ids={"b"}))] == ["b"]
    names = SimpleNamespace(req_ids=[*again], resumed_from_preemption=[*again.values()])
    assert [*_resumed(names)] == ["b", "c"]  # up to 0.11.0
    each = [SimpleNamespace(req_id=n, resumed_from_preemption=yes) for n, yes in again.items()]
    assert [*_resumed(each)] == ["b", "c"]  # up to 0.9.1


@pytest.mark.parametrize("counts", [True, False])
def test_sessions_keep_their_slot_where_vllm_counts_them(counts: bool) -> None:
    kind = FakeScheduler
    if not counts:  # up to 0.24
        kind = type("Older", (FakeScheduler,), {"schedule": lambda self: len(self.running)})
    scheduler = kind(make_manager(9), max_running=4)
    scheduler.num_waiting_for_streaming_input = 3
    assert SchedulerView(scheduler).free_run_slots() == (1 if counts else 4)


@pytest.mark.parametrize("seed", range(20))
def test_heap_order_is_sorted_order(seed: int) -> None:
    random.seed(seed)
    heap = [random.randrange(50) for _ in range(seed * 7)]
    heapq.heapify(heap)
    before = list(heap)
    assert list(_heap_order(heap)) == sorted(heap)
    assert heap == before


def test_heap_order_is_lazy() -> None:
    random.seed(1)
    heap = [Counted(random.random()) for _ in range(100_000)]
    heapq.heapify(heap)
    Counted.compared = 0
    first = list(islice(_heap_order(heap), 5))
    compared = Counted.compared
    assert [item.value for item in first] == sorted(item.value for item in heap)[:5]
    assert compared < 100


@pytest.mark.parametrize("holding", HOLDING)
def test_waiting_follows_the_order_of_schedule(holding: str) -> None:
    view = make_view(holding=holding)
    requests = [make_request(prompt(1)) for _ in range(5)]
    for request in requests[2:]:
        view.scheduler.waiting.add_request(request)
    assert view.has_waiting()
    for request in requests[:2]:
        view.scheduler.holding.add_request(request)
    assert list(view.waiting()) == requests


@pytest.mark.parametrize("holding", HOLDING)
def test_waiting_follows_priorities(holding: str) -> None:
    view = make_view(holding=holding, policy="priority")
    random.seed(2)
    requests = [make_request(prompt(1), priority=random.randrange(4)) for _ in range(40)]
    for request in requests[:30]:
        view.scheduler.waiting.add_request(request)
    for request in requests[30:]:
        view.scheduler.holding.add_request(request)
    expected = list(view.scheduler.holding) + list(view.scheduler.waiting)
    if holding == "skipped_waiting":  # up to 0.30 whichever queue has the first of all is next
        expected.sort()
    else:
        assert expected[:10] == sorted(requests[30:])
    assert list(view.waiting()) == expected


@pytest.mark.parametrize("holding", HOLDING)
def test_one_request_in_either_queue_waits(holding: str) -> None:
    view = make_view(holding=holding)
    assert not view.has_waiting()
    view.scheduler.holding.add_request(make_request(prompt(1)))
    assert view.has_waiting()


def test_who_goes_on_without_a_lookup() -> None:
    view = make_view()
    fresh, session, received, receiving = (make_request(prompt(1)) for _ in range(4))
    for request in (session, received, receiving):
        request.num_computed_tokens = BLOCK
    for request in (received, receiving):
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    view.scheduler.finished_recving_kv_req_ids.add(received.request_id)
    asked = [fresh, session, received, receiving]
    assert [view.resumes_without_lookup(request) for request in asked] == [False, True, True, False]
    assert [view.needs_lookup(request) for request in asked] == [True, False, False, False]


@pytest.mark.parametrize("holding", HOLDING)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("status", [RequestStatus.WAITING, RequestStatus.PREEMPTED])
def test_parking_is_undone(holding: str, policy: str, status: RequestStatus) -> None:
    view = make_view(holding=holding, policy=policy)
    request, other = make_request(prompt(1)), make_request(prompt(1))
    request.status = status
    view.scheduler.waiting.add_request(request)
    view.scheduler.waiting.add_request(other)
    view.park(request)
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert not view.needs_lookup(request)
    view.unpark([request.request_id])
    assert request.status == status
    assert list(view.scheduler.waiting) == [request, other]
    assert not view.scheduler.holding


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_an_unparked_request_leaves_the_queue_of_those_that_hold_blocks(policy: str) -> None:
    view = make_view(policy=policy)
    other, request, holder = (make_request(prompt(1), arrival_time=t) for t in (2.0, 1.0, 0.0))
    view.park(request)
    view.scheduler.holding.add_request(holder)
    view.scheduler.holding.add_request(request)
    view.scheduler.waiting.add_request(other)
    view.unpark([request.request_id])
    assert list(view.scheduler.holding) == [holder]
    assert list(view.scheduler.waiting) == [request, other]


def test_an_unparked_request_stays_among_those_skipped_in_older_releases() -> None:
    view = make_view(holding="skipped_waiting")
    request = make_request(prompt(1))
    view.park(request)
    view.scheduler.holding.add_request(request)
    view.unpark([request.request_id])
    assert list(view.scheduler.holding) == [request]
    assert not view.scheduler.waiting


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_of_two_that_are_unparked_only_the_one_that_was_moved_is_put_back(policy: str) -> None:
    """The other is in its queue yet, and would be there twice. One may also be named twice."""
    view = make_view(policy=policy)
    moved, there = (make_request(prompt(1), arrival_time=t) for t in (0.0, 1.0))
    for request in (moved, there):
        view.park(request)
    view.scheduler.holding.add_request(moved)
    view.scheduler.waiting.add_request(there)
    view.unpark([moved.request_id, there.request_id, moved.request_id])
    assert list(view.scheduler.waiting) == [moved, there] and not view.scheduler.holding
    assert not view.is_parked(moved) and not view.is_parked(there)


def test_no_more_requests_run_than_vllm_lets_run_however_many_are_admitted() -> None:
    view = make_view(max_running=4)
    for admitted, limit in ((9, 4), (3, 3)):
        view.cap_admissions(admitted)
        assert view.scheduler.max_num_running_reqs == limit
        view.schedule_over()
        assert view.scheduler.max_num_running_reqs == 4


def test_a_status_that_others_have_set_since_is_left_alone() -> None:
    view = make_view()
    request = make_request(prompt(1))
    view.park(request)
    request.status = RequestStatus.FINISHED_ABORTED
    view.scheduler.holding.add_request(request)
    view.unpark([request.request_id])
    assert request.status == RequestStatus.FINISHED_ABORTED
    assert list(view.scheduler.holding) == [request]


@pytest.mark.parametrize("status", list(RequestStatus))
def test_open_are_those_that_wait_for_nothing_but_their_turn(status: RequestStatus) -> None:
    view = make_view()
    request = make_request(prompt(1))
    request.status = status
    expected = status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
    assert view.needs_lookup(request) is expected
    request.num_computed_tokens = 1
    assert not view.needs_lookup(request)


@pytest.mark.parametrize(("dropped", "asked"), [(False, False), (True, True)])
def test_one_that_was_preempted_waits_for_its_tokens_under_way(dropped: bool, asked: bool) -> None:
    """From 0.27 on vLLM passes over it until these are there, unless it wants none of them."""
    view, request = make_view(), make_request(prompt(1))
    request.status = RequestStatus.PREEMPTED
    request.num_stale_output_tokens, request.drop_stale_output = 2, dropped
    assert view.needs_lookup(request) is asked
    request.num_stale_output_tokens = 0
    assert view.needs_lookup(request)


def test_a_request_is_open_once_its_grammar_is_there() -> None:
    view = make_view()
    request = make_request(prompt(1))
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    request.structured_output_request = SimpleNamespace(grammar=None)
    assert not view.needs_lookup(request)
    request.structured_output_request.grammar = object()
    assert view.needs_lookup(request)
    view.park(request)
    assert view.is_parked(request) and not view.needs_lookup(request), "a load is under way for it"
    view.unpark()
    assert not view.is_parked(request) and view.needs_lookup(request)
    request.structured_output_request.grammar = ValueError("it cannot be compiled")
    assert not view.needs_lookup(request)
    request.structured_output_request = None
    assert not view.needs_lookup(request)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("lookahead", [0, 5, 20])
def test_the_bound_on_blocks_for_running_requests_holds(in_flight: int, lookahead: int) -> None:
    demand_of_running(in_flight, lookahead)


def test_a_probe_leaves_pools_and_statistics_as_they_were() -> None:
    view = make_view()

    class Broken:
        hash_block_size = BLOCK

        def get_cached_block(self, *_: Any) -> None:
            raise LookupError

    view.manager.log_stats = True
    with pytest.raises(LookupError):
        view.prefix.longest_hit(make_request(prompt(2)), Broken())
    assert view.manager.log_stats is True
    managers = view.manager.coordinator.single_type_managers
    assert [m.block_pool for m in (view.manager.coordinator, *managers)] == [view.pool, view.pool]


@pytest.mark.parametrize(
    ("request_", "may"),
    [
        (SimpleNamespace(skip_reading_prefix_cache=True), False),
        (SimpleNamespace(skip_reading_prefix_cache=False), True),
        (SimpleNamespace(sampling_params=None), True),
        (SimpleNamespace(sampling_params=SimpleNamespace(prompt_logprobs=None)), True),
        (SimpleNamespace(sampling_params=SimpleNamespace(prompt_logprobs=0)), False),
    ],
)
def test_who_may_hit_is_told_from_the_request(request_: Any, may: bool) -> None:
    assert SchedulerView.may_hit(request_) is may


@pytest.mark.parametrize(
    ("status", "computed", "arrived", "resumes"),
    [
        (RequestStatus.WAITING_FOR_REMOTE_KVS, 0, True, True),  # up to 0.17, or its load failed
        (RequestStatus.WAITING_FOR_REMOTE_KVS, 48, True, True),
        (RequestStatus.WAITING_FOR_REMOTE_KVS, 48, False, False),
        (RequestStatus.WAITING, 48, False, True),
        (RequestStatus.WAITING, 0, False, False),
    ],
)
def test_who_is_past_its_lookup(
    status: RequestStatus, computed: int, arrived: bool, resumes: bool
) -> None:
    view = make_view()
    view.scheduler.finished_recving_kv_req_ids = {"a"} if arrived else set()
    request = SimpleNamespace(request_id="a", status=status, num_computed_tokens=computed)
    assert view.resumes_without_lookup(request) is resumes
