"""Whatever the tier raises: the engine serves on with right answers, and nothing of it stays."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

pytest.importorskip("vllm")

from integration.engine.mini import BLOCK, Mini
from scheduler_half.scenarios import free_blocks, prompt, raise_at, statuses, talk

from kvoffload_patch.integration.engine import breaker as breaker_module
from kvoffload_patch.integration.engine.breaker import FAILED_COPIES, FAILED_WINDOW_S
from kvoffload_patch.integration.errors import PromiseBroken
from kvoffload_patch.integration.protocol import PLAN, TIER
from kvoffload_patch.tier.policies import POLICIES
from kvoffload_patch.tier.policies.lru import LRUPolicy

# What the hooks call of the tier, and what the tier calls of its parts: (attribute of the tier or
# "", method), by names that a test of their own compares with the objects.
CALLED = [
    ("", "before_schedule"), ("", "_look_at_handed_out"), ("", "_computed"), ("", "after_schedule"),
    ("", "on_output"), ("", "on_finish"), ("", "reset"),
    ("_report", "tick"), ("_hits", "admitted"), ("_hits", "note"), ("_recency", "refresh"),
    ("_recency", "note"), ("_recency", "computes"), ("_recency", "ended"),
    ("_manager", "request_ended"), ("_lookups", "end_step"), ("_lookups", "blocks_reused"),
    ("_lookups", "keys_stored"), ("_admission", "look_up_waiting"), ("_full_prompts", "load"),
    ("_loads", "finish"), ("_loads", "load_inline"), ("_loads", "park"),
    ("_loads", "after_schedule"), ("_loads", "abort"), ("_manager", "make_plan"),
    ("_manager", "begin_load"), ("_manager", "expose_load"),
    ("_manager", "note_new_blocks"), ("_manager", "apply"), ("_manager", "hit_on_gpu"),
    ("_manager", "offer"), ("_front", "look"), ("_front", "hit"), ("_front", "handed_out"),
    ("_view", "publish"), ("_view", "take_blocks"), ("_view", "unpark"),
]  # fmt: skip


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The errors that are logged."""
    texts: list[str] = []
    logged = breaker_module.logger
    monkeypatch.setattr(logged, "error", lambda text, *a, **_: texts.append(text % a))
    return texts


def inject(mini: Mini, part: str, method: str, nth: int, after: bool) -> list[int]:
    """Make the nth call of a method raise, before or after it has done its work.

    Returns:
        A list that is empty until then.
    """
    owner: Any = getattr(mini.tier, part) if part else mini.tier
    as_made, calls, raised = getattr(owner, method), [0], list[int]()

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] != nth:
            return as_made(*args, **kwargs)
        raised.append(nth)
        if after:
            as_made(*args, **kwargs)
        raise LookupError(f"{method} is made to fail")

    setattr(owner, method, call)
    # What was bound when the tier was made, or its hooks were.
    for holder in (mini.tier, *vars(mini.tier).values()):
        for name, value in list(getattr(holder, "__dict__", {}).items()):
            if callable(value) and value == as_made and holder is not owner:
                setattr(holder, name, call)
    return raised


def fail_within(mini: Mini) -> None:
    """An inner hook fails when vLLM hands out a block, in the middle of `schedule`."""
    hook = mini.pool.get_new_blocks

    def get_new_blocks(count: int) -> Any:
        mini.pool.get_new_blocks = hook
        mini.breaker.failed("within", LookupError("it is made to fail"))
        return hook(count)

    mini.pool.get_new_blocks = get_new_blocks


def as_vllm_made_it(mini: Mini) -> None:
    """Nothing of the tier is on vLLM's objects, and no block is held."""
    assert mini.changed() == mini.before
    assert TIER not in vars(mini.scheduler)
    assert statuses(mini) == {} and mini.ranks.closed == 1
    assert free_blocks(mini) == len(mini.pool.blocks) - 1, "GPU blocks were lost"
    queued = mini.pool.free_block_queue.get_all_free_blocks()
    assert len({block.block_id for block in queued}) == len(queued) == free_blocks(mini)
    assert not any(block.ref_cnt for block in queued)
    assert mini.pool.reset_prefix_cache(), "something is still referenced"


RUNS = [
    (in_flight, load_mode, after)
    for load_mode in ("inline", "auto", "parked")
    for in_flight in (1, 2)
    for after in (False, True)
]


@pytest.mark.parametrize(("part", "method"), CALLED, ids=[f"{p}.{m}" for p, m in CALLED])
def test_any_call_of_the_tier_may_raise(part: str, method: str, errors: list[str]) -> None:
    rng = random.Random(f"{part} {method}")
    happened = 0
    for seed, (in_flight, load_mode, after) in enumerate(RUNS):
        late = rng.randrange(4)
        mini = Mini(in_flight=in_flight, late=late, load_mode=load_mode, store="auto", weighs=False)
        raised = inject(mini, part, method, rng.randrange(1, 8), after)
        talk(mini, seed, turns=3, talks=8)
        while method == "reset" and not raised:
            mini.scheduler.reset_prefix_cache()
        if not raised:
            continue  # one that this mode of loading does not call
        happened += 1
        assert mini.breaker.detached, "nobody noticed the failure"
        as_vllm_made_it(mini)
        plans = len(mini.plans)
        talk(mini, seed + 99, turns=1, talks=8)
        assert len(mini.plans) == plans, "a tier that is gone has planned copies"
    assert happened and len(errors) == happened
    assert all(f"LookupError: {method} is made to fail" in text for text in errors)


def begin_inline_load(mini: Mini) -> str:
    """A request waits whose first blocks only the tier has, and of whose others one gets full."""
    prompt = list(range(100, 100 + 4 * BLOCK))
    mini.only_in_cpu(prompt)
    return mini.add([*prompt, *range(BLOCK + 1)], count=3)


@pytest.mark.parametrize("method", ["_computed", "_look_at_handed_out", "after_schedule"])
def test_bytes_promised_within_the_step_arrive_before_it_runs(method: str) -> None:
    """The blocks are in the prefix cache, and a request has been given them, without any bytes."""
    mini = Mini(load_mode="inline")
    begin_inline_load(mini)
    mini.tier._look_at_handed_out()  # of what came before; the next is within `before_schedule`
    nth = 2 if method == "_look_at_handed_out" else 1
    raised = inject(mini, "", method, nth, after=False)
    scheduled = mini.begin_step()
    assert raised and not hasattr(scheduled, PLAN)
    (new,) = scheduled.scheduled_new_reqs
    assert new.num_computed_tokens == 4 * BLOCK, "it was given what was to be loaded"
    mini.end_step()
    mini.run()
    mini.check()
    as_vllm_made_it(mini)


def test_a_plan_that_is_on_the_output_already_is_carried_out_once() -> None:
    mini = Mini(load_mode="inline")
    begin_inline_load(mini)
    assert inject(mini, "_report", "tick", 1, after=False) == []
    stored = mini.manager.stats.stored
    scheduled = mini.begin_step()
    assert mini.breaker.detached and not hasattr(scheduled, PLAN)
    mini.end_step()
    mini.run()
    mini.check()
    assert mini.manager.stats.stored == stored


@pytest.mark.parametrize("why", ["the load fails", "a rank does not answer", "no plan"])
def test_a_promise_that_cannot_be_kept_ends_the_engine(
    why: str, monkeypatch: pytest.MonkeyPatch, errors: list[str]
) -> None:
    mini = Mini(load_mode="inline", fails=lambda d, ticket: d == "load" and why == "the load fails")
    begin_inline_load(mini)
    inject(mini, "", "_computed", 1, after=False)
    if why == "a rank does not answer":
        monkeypatch.setattr(mini.ranks, "finish", lambda plan: 1 / 0)
    if why == "no plan":
        monkeypatch.setattr(mini.manager, "make_plan", lambda *_: 1 / 0)
    with pytest.raises(
        PromiseBroken, match="after_schedule: LookupError: _computed is made to fail"
    ) as e:
        mini.begin_step()
    assert "restart the server" in str(e.value) and errors == []
    assert isinstance(e.value.__cause__, LookupError)


def test_a_broken_promise_of_the_tier_itself_is_raised_as_it_is() -> None:
    mini = Mini(load_mode="inline")
    begin_inline_load(mini)

    def broken(*_: Any) -> None:
        raise PromiseBroken("kvoffload_patch: the result is lost.")

    mini.tier.on_output = broken
    mini.begin_step()
    with pytest.raises(PromiseBroken, match=r"^kvoffload_patch: the result is lost\.$"):
        mini.end_step()


def test_parked_requests_get_their_status_back_and_no_load_is_published() -> None:
    mini = Mini(load_mode="parked", late=50)
    name = begin_inline_load(mini)
    mini.begin_step()
    assert statuses(mini)[name] == "WAITING_FOR_REMOTE_KVS"
    inject(mini, "_report", "tick", 1, after=False)
    mini.end_step()
    mini.begin_step()
    assert mini.breaker.detached and statuses(mini)[name] == "WAITING"
    mini.end_step()
    mini.run()
    mini.check()
    assert mini.hits[name] == 0, "it has hit what was never published"
    as_vllm_made_it(mini)


def test_aborting_a_parked_request_is_what_fails() -> None:
    mini = Mini(load_mode="parked", late=50)
    name = begin_inline_load(mini)
    mini.begin_step()
    inject(mini, "_loads", "abort", 1, after=False)
    mini.abort(name)
    assert name not in mini.scheduler.requests
    mini.run()
    as_vllm_made_it(mini)


def test_a_failure_within_vllm_waits_until_its_queues_are_at_rest() -> None:
    """An allocation fails in the middle of `schedule`: the queue that it walks is left alone."""
    mini = Mini(load_mode="parked", late=50)
    parked = begin_inline_load(mini)
    mini.begin_step()
    mini.end_step()
    fail_within(mini)
    seen = []
    as_made = mini.scheduler._update_after_schedule

    def look(output: Any) -> None:
        seen.append((mini.breaker.detached, statuses(mini)[parked]))
        as_made(output)

    mini.scheduler._update_after_schedule = look
    mini.add(list(range(900, 940)), count=2)
    mini.begin_step()
    assert seen == [(False, "WAITING_FOR_REMOTE_KVS")]
    assert mini.breaker.detached and statuses(mini)[parked] == "WAITING"
    del mini.scheduler._update_after_schedule
    mini.end_step()
    mini.run()
    mini.check()
    as_vllm_made_it(mini)


@pytest.mark.parametrize("kind", ["load", "store"])
def test_many_copies_that_fail_within_a_window_detach_the_tier(
    kind: str, errors: list[str]
) -> None:
    mini = Mini(
        fails=lambda direction, ticket: direction == kind,
        load_mode="parked",
        max_failed_copies=FAILED_COPIES,
    )
    talk(mini, seed=3, turns=5, talks=11, aborts=0)
    assert mini.breaker.detached
    assert FAILED_COPIES <= mini.manager.stats.failed_copies < 2 * FAILED_COPIES
    assert len(errors) == 1 and "copies have failed within 60 s" in errors[0]
    as_vllm_made_it(mini)


class Forgetful(LRUPolicy):
    """A policy of a user's own that evicts what is being loaded."""

    def pin(self, slots: Any) -> None: ...


def test_a_policy_that_evicts_what_is_pinned_is_named(
    errors: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POLICIES, "lru", Forgetful)
    mini = Mini(late=50, num_slots=8, load_mode="parked", store="eager", eviction="lru")
    mini.only_in_cpu(prompt(5, seed=1))
    mini.add(prompt(5, seed=1, tail=3), count=2)
    mini.step()
    assert mini.tier.counts().parked_now
    mini.add(prompt(6, seed=2), count=5)
    mini.run()
    mini.check()
    assert mini.breaker.detached and len(errors) == 1
    assert f"PolicyBroken: expected the eviction policy {__name__}.Forgetful to" in errors[0]
    assert f"{__name__}.Forgetful" in mini.breaker.failure


def test_of_an_error_with_a_long_text_the_beginning_is_told(errors: list[str]) -> None:
    """An answer over the control socket and a label of /metrics have it."""
    mini = Mini()
    mini.breaker.failed("within", LookupError("not\nthere " + "x" * 100_000))
    mini.add(prompt(5, seed=1))
    mini.run()
    assert mini.breaker.detached and len(errors) == 1
    failure = mini.breaker.failure
    assert failure.startswith("within: LookupError: not there xx") and len(failure) < 1000
    assert failure.endswith("xx...; restart the server to have the CPU tier again")


def test_copies_that_fail_now_and_then_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def later() -> float:
        now[0] += FAILED_WINDOW_S / (FAILED_COPIES - 1) + 1
        return now[0]

    monkeypatch.setattr(breaker_module.time, "monotonic", later)
    mini = Mini(
        fails=lambda direction, ticket: direction == "store",
        load_mode="parked",
        max_failed_copies=FAILED_COPIES,
    )
    talk(mini, seed=3, turns=5, talks=11, aborts=0)
    assert mini.manager.stats.failed_copies > 2 * FAILED_COPIES and not mini.breaker.detached


def test_closing_puts_everything_back_and_comes_once() -> None:
    mini = Mini(load_mode="parked")
    begin_inline_load(mini)
    mini.run()
    mini.breaker.close()
    mini.breaker.close()
    as_vllm_made_it(mini)


def test_closing_puts_everything_back_whatever_fails_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mini = Mini()

    def failing() -> None:
        raise LookupError("made to fail")

    monkeypatch.setattr(mini.tier._report, "flush", failing)
    with pytest.raises(LookupError):
        mini.breaker.close()
    as_vllm_made_it(mini)


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_that_others_have_wrapped_call_on_and_note_nothing(fails: bool) -> None:
    """They cannot be taken off: what others have set over them calls them as before."""
    mini = Mini()
    tokens = prompt(4, seed=1)
    hooks = [(owner, name, hook) for owner, name, hook in mini.hooks._set]
    for owner, name, hook in hooks:
        setattr(owner, name, lambda *args, _hook=hook, **more: _hook(*args, **more))
    mini.only_in_cpu(tokens)
    if fails:
        mini.breaker.failed("by hand", LookupError("made to fail"))
        mini.add(tokens)
        mini.step()
    else:
        mini.breaker.close()
    assert mini.breaker.detached and len(hooks) > 5
    noted = len(mini.tier.cached), len(mini.tier.handed_out)
    before = len(mini.plans)
    name, gone = mini.add(tokens), mini.add(prompt(3, seed=2))
    mini.step()
    mini.abort(gone)
    mini.run()
    mini.check()
    assert mini.pool.reset_prefix_cache() and len(mini.answers[name]) == 4
    assert (len(mini.tier.cached), len(mini.tier.handed_out)) == noted, "nobody looks at it"
    assert mini.plans[before:] == [] and mini.ranks.closed == 1


def test_a_scheduler_with_a_tier_is_not_copied_with_its_hooks() -> None:
    """The copy's hooks would act upon the tier of the original."""
    mini = Mini()
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(mini.breaker)
    with pytest.raises(TypeError):
        copy.deepcopy(mini.scheduler)


def test_an_abort_by_vllm_itself_while_it_takes_an_output_in() -> None:
    """The aborted request is put where vLLM looks for it; its queues are left alone until later."""
    mini = Mini(load_mode="parked", late=50)
    prompts = [list(range(seed, seed + 2 * BLOCK + 1)) for seed in (100, 500)]
    mini.only_in_cpu(*prompts)
    first, second = [mini.add(prompt) for prompt in prompts]
    mini.begin_step()
    inject(mini, "_loads", "abort", 1, after=False)
    mini.breaker.begin_update(*mini.queue[-1])
    request = mini.scheduler.requests[first]
    mini.abort(first)
    assert request.status.name == "FINISHED_ABORTED" and first not in mini.scheduler.requests
    assert not any(request in iter(queue) for queue in mini.view._queues)
    assert not mini.breaker.detached and statuses(mini)[second] == "WAITING_FOR_REMOTE_KVS"
    mini.breaker.end_update()
    mini.end_step()
    assert mini.breaker.detached and statuses(mini)[second] == "WAITING"
    mini.run()
    mini.check()
    as_vllm_made_it(mini)


@pytest.mark.parametrize("fails", ["", "make_plan", "disclaim"])
def test_no_common_prefix_is_told_while_the_tier_holds_blocks(
    fails: str, monkeypatch: pytest.MonkeyPatch, errors: list[str]
) -> None:
    """As up to 0.31, where the references that say it may be the tier's."""
    from vllm.v1.core.sched.output import SchedulerOutput

    made = SchedulerOutput.__init__

    def with_prefix(output: Any, *args: Any, **kwargs: Any) -> None:
        made(output, *args, **kwargs)
        output.num_common_prefix_blocks = [5]

    mini = Mini(load_mode="parked", late=50)
    mini.only_in_cpu(prompt(3, seed=1))
    monkeypatch.setattr(SchedulerOutput, "__init__", with_prefix)
    mini.add(prompt(1, seed=2))
    assert mini.begin_step().num_common_prefix_blocks == [5]
    mini.add(prompt(3, seed=1))
    if fails == "make_plan":
        raise_at(mini, "_manager", "make_plan", 1)
    elif fails:
        disclaim, first = mini.view.adapter.disclaim, [LookupError("made to fail")]

        def fail_first(output: Any) -> None:
            if first:
                raise first.pop()
            disclaim(output)

        monkeypatch.setattr(mini.view.adapter, "disclaim", fail_first)
    assert mini.begin_step().num_common_prefix_blocks == [0]
    assert mini.breaker.detached == bool(fails)
