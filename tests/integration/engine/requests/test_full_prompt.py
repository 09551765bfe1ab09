"""Which steps are changed so that a prompt's last block is loaded, and how."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload_patch.integration.engine.requests.full_prompt import FullPromptHits
from kvoffload_patch.integration.engine.requests.pace import Pace
from kvoffload_patch.integration.engine.tuning import LAYERED_LOAD_MS
from kvoffload_patch.links import LOAD
from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.policies.lru import LRUPolicy

SIZE = 16
KEY = "the last block's"
LOGPROBS = SimpleNamespace(prompt_logprobs=0)


def view(**more: Any) -> Any:
    about = {"num_tokens": 64, "num_in_flight_tokens": 20, "sampling_params": None}
    requests = {name: SimpleNamespace(**about) for name in "ab"}
    scheduler = SimpleNamespace(connector=None, requests=requests)
    shown = {"scheduler": scheduler, "block_sizes": (SIZE,), "decode_tokens": 1}
    shown |= {"state_groups": frozenset(), "is_stale": lambda request: False, **more}
    return SimpleNamespace(**shown)


def output(done: int = 48, scheduled: int = SIZE, has: str = "", **more: Any) -> Any:
    """A step in which request a begins, and b computes what it computes."""
    has_more = {has: [0]} if has else {"mm_features": [], "prompt_embeds": None}
    new = SimpleNamespace(req_id="a", num_computed_tokens=done, **has_more)
    shown = {
        "scheduled_new_reqs": [new],
        "num_scheduled_tokens": {"b": 7, "a": scheduled},
        "total_num_scheduled_tokens": 7 + scheduled,
        **more,
    }
    return SimpleNamespace(**shown)


def block(block_id: int, key: object) -> Any:
    return SimpleNamespace(block_id=block_id, block_hash=key)


@pytest.fixture
def manager() -> OffloadManager:
    """It has the block."""
    made = OffloadManager(4, LRUPolicy)
    made.queue_store(KEY, 3)
    assert made.make_plan(lambda *_: True)
    made.apply(made.drained())
    return made


def changed(
    step: Any, scheduler: Any, manager: OffloadManager, alone: bool = True, pace: Pace | None = None
) -> bool:
    """Whether a step is changed; if so, it is as it must be."""
    readers: list[str] = []
    before = vars(step).copy()
    b, a = SimpleNamespace(request_id="b"), SimpleNamespace(request_id="a")
    cached = [(b, [block(8, "x")]), (a, [block(7, "y"), block(9, KEY)])]
    FullPromptHits(scheduler, manager, pace or Pace(1.0)).load(step, cached, readers, alone)
    plan = manager.make_plan(lambda *_: True)
    if plan is None:
        assert vars(step) == before
        assert (step.num_scheduled_tokens["b"], readers) == (7, [])
        return False
    (load,) = plan.before
    assert (load.target_ids, plan.promised) == ((9,), ((LOAD, load.ticket),))
    assert step.scheduled_new_reqs[0].num_computed_tokens == 63
    assert step.num_scheduled_tokens == {"b": 7, "a": 1}
    assert step.total_num_scheduled_tokens == 8
    assert scheduler.scheduler.requests["a"].num_in_flight_tokens == 20 - (SIZE - 1)
    assert readers == ["a"]
    return True


def test_one_token_is_computed_where_the_tier_has_the_last_block(manager: OffloadManager) -> None:
    assert changed(output(), view(), manager)
    others = view()
    others.scheduler.requests["a"].sampling_params = SimpleNamespace(prompt_logprobs=None)
    assert changed(output(), others, manager)


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("long", [False, True])
def test_a_step_that_waits_for_a_long_load_by_layer_computes_the_last_block(
    manager: OffloadManager, by_layer: bool, long: bool
) -> None:
    pace = Pace(ms_per_block=1.0, overlap=0.75, now=lambda: 5.0)
    pace.by_layer = by_layer
    pace.load_begins(int(LAYERED_LOAD_MS) + long)
    assert changed(output(), view(), manager, pace=pace) != (by_layer and long)


UNCHANGED: dict[str, tuple[Any, Any]] = {
    "more than a block is left": (output(done=32, scheduled=32), view()),
    "a part of it is left": (output(done=56, scheduled=8), view()),
    "its tokens go on after it": (output(done=32), view()),
    "nothing was hit, so it may not read the cache": (output(done=0), view()),
    "it has images": (output(has="mm_features"), view()),
    "it has images, as in 0.9": (output(has="mm_inputs"), view()),
    "it has no tokens": (output(has="prompt_embeds"), view()),
    "hidden states are pooled": (output(has="pooling_params"), view()),
    "its prompt's logprobs are wanted": (output(), view()),
    "the runner zeroes blocks first": (output(new_block_ids_to_zero=[9]), view()),
    "nobody begins": (output(scheduled_new_reqs=[]), view()),
    "a draft model": (output(), view(decode_tokens=3)),
    "a state": (output(), view(state_groups=frozenset({0}))),
    "several groups": (output(), view(block_sizes=(SIZE, SIZE))),
    "its adapter was loaded again": (output(), view(is_stale=lambda request: True)),
    "it is a turn of a session": (output(), view()),
    "connector": (output(), view()),
    "ec_connector": (output(), view()),
}


@pytest.mark.parametrize("why", UNCHANGED)
def test_a_step_is_left_alone_if(why: str, manager: OffloadManager) -> None:
    step, shown = UNCHANGED[why]
    if "_" in why or why == "connector":
        setattr(shown.scheduler, why, object())
    shown.scheduler.requests["a"].resumable = "session" in why
    shown.scheduler.requests["a"].sampling_params = LOGPROBS if "logprobs" in why else None
    shown.scheduler.requests["a"].num_tokens = 64 if "nothing was hit" not in why else SIZE
    assert not changed(step, shown, manager)


def test_what_the_tier_does_not_have_is_computed() -> None:
    assert not changed(output(), view(), OffloadManager(4, LRUPolicy))


def test_beside_other_loads_only_who_waits_for_one_anyway(
    manager: OffloadManager,
) -> None:
    assert not changed(output(), view(), manager, alone=False)
    FullPromptHits(view(), manager, Pace(1.0)).load(
        output(), [(SimpleNamespace(request_id="a"), [block(9, KEY)])], ["a"], alone=False
    )
    assert manager.make_plan(lambda *_: True) is not None


def test_older_requests_do_not_count_tokens_in_flight(manager: OffloadManager) -> None:
    shown, step = view(), output()
    shown.scheduler.requests["a"] = SimpleNamespace(num_tokens=64, sampling_params=None)
    FullPromptHits(shown, manager, Pace(1.0)).load(
        step, [(SimpleNamespace(request_id="a"), [block(9, KEY)])], [], alone=True
    )
    assert vars(shown.scheduler.requests["a"]) == {"num_tokens": 64, "sampling_params": None}
    assert step.num_scheduled_tokens["a"] == 1
