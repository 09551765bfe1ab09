"""What is kept through sleep is used if the weights are the same, and forgotten if not."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from integration.engine.connectors import Connector
from integration.engine.mini import BLOCK, Mini
from integration.engine.world import FakeRanks, World, make_request, prompt
from vllm.v1.core.sched.interface import PauseState

from kvoffload_patch.config import Settings
from kvoffload_patch.integration.engine import hooks, step_hooks
from kvoffload_patch.integration.engine.blocks.weights import can_keep, changes_weights
from kvoffload_patch.integration.metrics import ON, PAUSED
from kvoffload_patch.integration.protocol import TIER
from kvoffload_patch.tier.stats import TierStats

PROMPT = prompt(3, seed=1)
LONGER = list(range(3 * BLOCK + 1))  # with the blocks of `Mini`
NONE = TierStats().removed


class Ranks(FakeRanks):
    """Two ranks whose weights are numbers."""

    asleep = False
    found = ("a", "b")

    def weights(self) -> tuple[str, ...]:
        assert not self.asleep, "memory that was given back is read"
        self.calls.append("weights")
        return self.found


class Engine:
    """An engine core whose sleep is vLLM's as far as the scheduler is concerned."""

    def __init__(self, store: str = "eager", watched: bool = True) -> None:
        self.world = World(store=store)
        self.ranks = Ranks()
        self.world.tier.weights._ranks = self.ranks
        setattr(self.world.scheduler, TIER, self.world.breaker)
        self.core = SimpleNamespace(scheduler=self.world.scheduler)
        if watched:
            self.world.tier.weights.watch()
        self.world.only_in_cpu(PROMPT)

    def reset(self) -> None:
        """As a user asks for it."""
        step_hooks.reset_prefix_cache(
            self.world.pool.reset_prefix_cache, [True], self.world.breaker
        )()

    def sleep(self, *args: Any, **kwargs: Any) -> None:
        def wrapped(*_: Any, **__: Any) -> None:
            self.reset()
            self.ranks.asleep = True

        hooks.sleep(wrapped, self.core, args, kwargs)

    def call(self, method: Any, fails: bool = False) -> None:
        """By RPC, as a user."""

        def wrapped(*_: Any, **__: Any) -> list[None]:
            if fails:
                raise RuntimeError("half of it is written")
            return [None]

        assert hooks.collective_rpc(wrapped, self.core, (method,), {}) == [None]

    def found(self) -> int:
        """Blocks loaded for the prompt once the engine is awake."""
        self.ranks.asleep = False
        request = self.world.add(PROMPT)
        plan = self.world.step(request)
        return len(plan.before[0].source_ids) if plan is not None and plan.before else 0


@pytest.mark.parametrize("store", ["eager", "auto"])
@pytest.mark.parametrize("level", [((), {}), ((1,), {}), ((), {"level": 1, "mode": "wait"})])
def test_the_tier_survives_level_1(store: str, level: tuple[Any, Any]) -> None:
    engine = Engine(store)
    engine.sleep(*level[0], **level[1])
    assert engine.found() == 3


def test_a_step_of_an_engine_that_sleeps_finds_nothing() -> None:
    """As where vLLM was woken in part: the weights are not there, so nobody can compare them."""
    engine = Engine()
    engine.sleep(1)
    world = engine.world
    assert world.offload.num_used
    request = world.add(PROMPT)
    plan = world.step(request)
    assert plan is None or not plan.before
    assert world.offload.stats.removed["weights"] == 3
    assert engine.world.tier.weights.doubted, "it is compared once it can be"


@pytest.mark.parametrize("well", [True, False])
def test_a_copy_that_failed_unheard_is_a_reason_to_keep_nothing(well: bool) -> None:
    engine = Engine("eager")
    world = engine.world
    request = world.add(prompt(2, seed=7))
    world.step(request)
    world.end(request)
    assert world.offload.busy
    world.ranks.drain = lambda: well
    engine.sleep(1)
    assert world.offload.num_used == (5 if well else 0)


@pytest.mark.parametrize("told_of_all", [True, False])
def test_no_rank_falls_asleep_with_a_copy_of_which_nobody_has_told(told_of_all: bool) -> None:
    """The memory that it reads or writes is given back."""
    engine = Engine("eager")
    engine.world.ranks.told_of_all = told_of_all
    assert not engine.world.offload.busy
    engine.sleep(1)
    assert engine.world.ranks.calls == ([] if told_of_all else ["drain"])
    assert engine.world.offload.num_used == 3


@pytest.mark.parametrize("level", [0, 2])
def test_no_other_reset_keeps_anything(level: int) -> None:
    engine = Engine()
    engine.sleep(level)
    assert engine.world.offload.num_used == 0 and engine.found() == 0
    assert engine.world.offload.stats.removed == {**NONE, "reset": 3}
    engine = Engine()
    engine.sleep(1)
    engine.reset()
    assert engine.world.offload.num_used == 0 and engine.found() == 0


@pytest.mark.parametrize("found", [("a", "c"), ("a", ""), ("", "")])
def test_weights_that_were_changed_in_sleep_empty_it(found: tuple[str, ...]) -> None:
    engine = Engine()
    engine.sleep(1)
    assert engine.world.offload.num_used == 3
    engine.ranks.found = found
    assert engine.found() == 0
    assert engine.world.offload.stats.removed == {**NONE, "weights": 3}


@pytest.mark.parametrize("found", [("a", ""), ("", "")])
def test_weights_that_no_rank_or_not_every_one_compares_are_never_the_same(
    found: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank has the same empty text each time, whatever its weights are."""
    monkeypatch.setattr(Ranks, "found", found)
    engine = Engine()
    assert engine.world.offload.num_used == 3
    engine.sleep(1)
    assert engine.world.offload.num_used == 0 and engine.found() == 0


def test_weights_that_were_changed_before_sleep_and_back_in_it_empty_it() -> None:
    engine = Engine()
    engine.ranks.found = ("a", "c")
    engine.sleep(1)
    engine.ranks.found = ("a", "b")
    assert engine.found() == 0


def test_asleep_twice_is_compared_once_awake() -> None:
    engine = Engine()
    engine.sleep(1)
    engine.sleep(1)
    assert engine.world.offload.num_used == 3
    engine.ranks.found = ("a", "c")
    assert engine.found() == 0


def test_weights_that_are_changed_until_a_pause_ends_empty_it() -> None:
    """A trainer wakes the engine, which has steps while it is paused, and writes after some."""
    engine = Engine()
    engine.sleep(1)
    engine.ranks.asleep = False
    engine.world.scheduler.pause_state = PauseState.PAUSED_ALL
    engine.world.step()
    engine.ranks.found = ("a", "c")
    engine.world.scheduler.pause_state = PauseState.UNPAUSED
    assert engine.found() == 0


def test_an_engine_that_is_not_watched_asks_no_rank_and_keeps_nothing() -> None:
    engine = Engine(watched=False)
    engine.sleep(1)
    assert engine.found() == 0 and "weights" not in engine.ranks.calls


def test_a_sleep_that_fails_says_nothing_of_the_next_reset() -> None:
    engine = Engine()

    def wrapped(*_: Any, **__: Any) -> None:
        raise ValueError("no such mode")

    with pytest.raises(ValueError, match="no such mode"):
        hooks.sleep(wrapped, engine.core, (1, "shut"), {})
    engine.reset()
    assert engine.world.offload.num_used == 0


def test_a_sleep_that_waits_for_requests_keeps_what_is_held() -> None:
    engine, future = Engine(), Future[None]()
    assert hooks.sleep(lambda *_: future, engine.core, (1, "wait"), {}) is future
    engine.reset()
    future.set_result(None)
    assert engine.found() == 3
    engine.reset()
    assert engine.world.offload.num_used == 0


def test_a_reset_while_sleep_waits_for_requests_is_not_that_of_sleep() -> None:
    """A user's forgets everything, and what is held by the time of sleep's own is kept."""
    engine, future = Engine(), Future[None]()
    scheduler, held = engine.world.scheduler, engine.world.offload
    hooks.sleep(lambda *_: future, engine.core, (1, "wait"), {})
    scheduler.pause_state = PauseState.PAUSED_NEW
    scheduler.running.append(make_request(PROMPT))
    engine.reset()
    assert (held.num_used, held.stats.removed) == (0, {**NONE, "reset": 3})
    scheduler.running.clear()
    scheduler.pause_state = PauseState.UNPAUSED
    engine.world.only_in_cpu(PROMPT)
    engine.reset()
    future.set_result(None)
    assert engine.found() == 3


@pytest.mark.parametrize("resets", [1, 2])
def test_a_reset_of_a_users_before_sleeps_own_forgets_what_it_would_have_kept(resets: int) -> None:
    """Both come at rest where sleep keeps requests and waits for steps under way alone."""
    engine, future = Engine(), Future[None]()
    hooks.sleep(lambda *_: future, engine.core, (1, "keep"), {})
    engine.world.scheduler.pause_state = PauseState.PAUSED_ALL
    for _ in range(resets):
        engine.reset()
    future.set_result(None)
    assert engine.world.offload.num_used == (3 if resets == 1 else 0)


def test_a_sleep_that_keeps_requests_keeps_what_is_held() -> None:
    engine = Engine()
    scheduler = engine.world.scheduler
    scheduler.pause_state = PauseState.PAUSED_ALL
    scheduler.running.append(make_request(PROMPT))
    engine.sleep(1, "keep")
    assert engine.world.offload.num_used == 3


def test_a_sleep_that_waits_in_vain_says_nothing_of_the_next_reset() -> None:
    engine, future = Engine(), Future[None]()
    hooks.sleep(lambda *_: future, engine.core, (1, "wait"), {})
    future.set_exception(RuntimeError("a worker has died"))
    engine.reset()
    assert engine.world.offload.num_used == 0


def test_no_step_compares_again() -> None:
    engine = Engine()
    engine.sleep(1)
    assert engine.found() == 3
    calls = engine.ranks.calls.count("weights")
    engine.world.step(engine.world.add(prompt(2, seed=5)))
    assert engine.ranks.calls.count("weights") == calls


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({}, True),
        ({"enable_sleep_mode": False}, False),
        ({"quantization": "fp8"}, False),
        ({"wipe": True}, False),
        ({"lora_config": object()}, False),
        ({"speculative_config": object()}, False),
        ({"connector": object()}, False),
        ({"events": True}, False),
        ({"keep_asleep": False}, False),
        ({"old": True}, False),
    ],
)
def test_where_weights_alone_do_not_decide_nothing_is_kept(
    change: dict[str, Any], kept: bool
) -> None:
    scheduler = World().scheduler
    scheduler.connector = change.get("connector")
    scheduler.kv_cache_manager.block_pool.enable_kv_cache_events = change.get("events", False)
    if change.get("old"):
        del scheduler.pause_state
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            enable_sleep_mode=change.get("enable_sleep_mode", True),
            quantization=change.get("quantization"),
        ),
        lora_config=change.get("lora_config"),
        speculative_config=change.get("speculative_config"),
    )
    settings = Settings(keep_asleep=change.get("keep_asleep", True), wipe=change.get("wipe", False))
    assert can_keep(config, scheduler, settings) is kept


# Weights that are updated while the engine is awake


def load_weights(worker: Any) -> None:
    """A function of a user's own."""


class LoadWeights:
    """An object of a user's own that is called as a function."""

    def __call__(self, worker: Any) -> None:
        """It is."""


@pytest.mark.parametrize("method", ["update_weights", "finish_weight_update", load_weights])
@pytest.mark.parametrize("fails", [False, True])
def test_an_update_empties_the_tier_and_it_waits_for_a_reset(method: Any, fails: bool) -> None:
    engine = Engine(watched=False)
    world = engine.world
    if fails:
        with pytest.raises(RuntimeError, match="half of it"):
            engine.call(method, fails=True)
    else:
        engine.call(method)
    assert world.offload.num_used == 0 and world.tier.paused and world.tier.weights.mixed
    assert world.offload.stats.removed == {**NONE, "weights": 3}
    world.step(world.add(prompt(2, seed=5)))
    world.all_done()
    world.tier.resume()
    assert world.offload.num_used == 0 and world.tier.paused, "of the weights before, perhaps"
    for request in list(world.scheduler.running):
        world.end(request)
    engine.reset()
    assert not world.tier.paused and not world.tier.weights.mixed
    world.only_in_cpu(prompt(2, seed=6))
    assert world.offload.num_used == 2


def test_its_state_says_so() -> None:
    engine, told = Engine(watched=False), list[str]()
    breaker = engine.world.breaker
    breaker.reporter = SimpleNamespace(changed=lambda state, about: told.append(state))
    engine.call("update_weights")
    engine.reset()
    assert told == [PAUSED, ON]


def test_a_reset_that_fails_leaves_it_waiting() -> None:
    engine = Engine(watched=False)
    engine.world.step(engine.world.add(prompt(2, seed=5)))
    engine.call("update_weights")
    engine.reset()
    assert engine.world.tier.paused


@pytest.mark.parametrize("refuses", [lambda: False, lambda: 1 // 0])
def test_a_reset_that_only_a_connector_refuses_ends_the_wait(refuses: Any) -> None:
    """The GPU has been emptied by then; vLLM says False, or raises what the connector has."""
    mini = Mini(store="eager")
    Connector(mini, False).reset_cache = refuses
    mini.add(LONGER, count=1)
    mini.run()
    mini.breaker.weights_updated()
    assert mini.tier.paused
    with suppress(ZeroDivisionError):
        assert not mini.scheduler.reset_prefix_cache(reset_connector=True)
    assert not mini.tier.paused and not mini.tier.weights.mixed
    mini.only_in_cpu(LONGER)
    name = mini.add(LONGER, count=1)
    mini.run()
    assert mini.hits[name] == 3 * BLOCK


def test_a_reset_that_a_connector_and_the_gpu_refuse_leaves_it_waiting() -> None:
    mini = Mini(store="eager")
    Connector(mini, False).reset_cache = lambda: False
    mini.add(LONGER, count=30)
    mini.step()
    mini.breaker.weights_updated()
    assert not mini.scheduler.reset_prefix_cache(reset_connector=True)
    assert mini.tier.paused and mini.tier.weights.mixed


def test_an_update_right_after_a_reset_holds_nothing_up() -> None:
    engine = Engine(watched=False)
    engine.reset()
    engine.call("update_weights")
    assert not engine.world.tier.paused
    engine.world.only_in_cpu(PROMPT)
    assert engine.world.offload.num_used == 3


def test_an_update_in_sleep_empties_what_was_kept() -> None:
    engine = Engine()
    engine.sleep(1)
    engine.call("update_weights")
    assert engine.world.offload.num_used == 0 and not engine.world.tier.paused


def test_a_user_who_paused_it_resumes_it() -> None:
    engine = Engine(watched=False)
    engine.world.tier.pause()
    engine.call("update_weights")
    engine.reset()
    assert engine.world.tier.paused
    engine.world.tier.resume()
    assert not engine.world.tier.paused


def test_the_opt_out_keeps_what_is_held() -> None:
    engine = Engine(watched=False)
    tier = engine.world.tier
    tier.settings = replace(tier.settings, empty_on_update=False)
    engine.call("update_weights")
    assert engine.found() == 3


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("reload_weights", True),
        ("start_weight_update", True),
        ("reset_weights", True),
        ("update_named_param", True),
        ("Worker.broadcast_Parameter", True),
        ("load_model", True),
        ("receive_lora_update", True),
        ("broadcast_bucket", True),
        ("load_states", True),
        ("list_loras", False),
        (load_weights, True),
        ("compute_weight_checksums", False),
        ("init_weight_transfer_engine", False),
        ("sleep", False),
        ("get_kv_connector_handshake_metadata", False),
        (SimpleNamespace(), False),
        (partial(load_weights, 1), True),
        (partial(partial(print), 1), False),
        (LoadWeights(), True),
    ],
)
def test_names_of_calls_that_change_weights(method: Any, changes: bool) -> None:
    assert changes_weights(method) is changes


@pytest.mark.parametrize("hook", [hooks.collective_rpc, hooks.sleep])
def test_an_engine_that_has_no_scheduler_yet_calls_its_workers(hook):
    """Up to 0.17 vLLM does so while it makes an engine core."""
    made, called = SimpleNamespace(), []
    assert hook(lambda *args: called.append(args), made, ("update_weights",), {}) is None
    assert called == [("update_weights",)]
