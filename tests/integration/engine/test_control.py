"""What is asked over the control socket changes the tier between two steps, and no token."""

from __future__ import annotations

import gc
import queue
import threading
import time
import weakref
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from integration.engine.mini import BLOCK, SLOT_BYTES, FakeRanks, Mini
from integration.engine.reports.test_metrics import FrontEnd, reported
from scheduler_half.scenarios import nothing_held, prompt

from kvoffload_patch.config import GIB
from kvoffload_patch.control import client
from kvoffload_patch.control.commands import Command
from kvoffload_patch.control.errors import Refused
from kvoffload_patch.integration.engine import control
from kvoffload_patch.integration.engine.control import Desk
from kvoffload_patch.integration.errors import TierRefused
from kvoffload_patch.integration.protocol import engine_number
from kvoffload_patch.tier.policies import POLICIES

SIZE = SLOT_BYTES / GIB


def asked(mini: Mini, name: str, **values: Any) -> Any:
    """Ask, and take a step that has nothing else to do; what came of it."""
    one = mini.ask(name, **values)
    mini.begin_step()
    mini.end_step()
    assert one.done.is_set()
    return one


def removed(mini: Mini) -> dict[str, int]:
    """Blocks that left the tier, not to make room, by reason; as the status says it."""
    assert mini.desk is not None
    return {why: n for why, n in mini.desk.status()["removed_blocks"].items() if n}


def hits(mini: Mini, tokens: list[int]) -> int:
    """Tokens that a prompt finds cached, its answer being right."""
    name = mini.add(tokens)
    mini.run()
    mini.check()
    return mini.hits[name]


def test_a_paused_tier_loads_and_stores_nothing_until_it_is_resumed() -> None:
    mini = Mini()
    old, new = prompt(6, seed=1), prompt(6, seed=2)
    mini.only_in_cpu(old)
    assert not asked(mini, "pause").error
    before = vars(mini.manager.stats).copy(), mini.manager.num_used
    assert hits(mini, old) == 0
    assert before[0].pop("paused") == 0 and mini.manager.stats.paused == 6
    mini.only_in_cpu(new)
    after = vars(mini.manager.stats).copy()
    assert after.pop("paused") >= 12, "what is computed meanwhile is counted as not stored"
    assert (after, mini.manager.num_used) == before
    assert mini.desk is not None and mini.desk.status()["state"] == "paused"
    asked(mini, "resume")
    assert hits(mini, old) == 6 * BLOCK, "what it held is still there"
    mini.only_in_cpu(new)
    assert hits(mini, new) == 6 * BLOCK
    nothing_held(mini)


def test_what_waits_to_be_stored_when_it_is_paused_is_counted() -> None:
    """The few blocks that decodes fill wait for some steps."""
    mini = Mini(blocks=100, store="eager")
    mini.add(prompt(2, seed=1), count=2 * BLOCK)
    while not mini.manager._waiting:
        mini.step()
    mini.ask("pause")
    mini.run()
    mini.settle()
    stats = mini.manager.stats
    assert (stats.stored, stats.paused) == (2, 2), "of four blocks that are computed"
    nothing_held(mini)


def test_what_the_gpu_loses_while_it_is_paused_is_not_stored() -> None:
    """It may be of other weights than its key stands for."""
    mini = Mini(store="lazy")
    mini.add(prompt(6, seed=1), count=1)
    mini.run()
    mini.ask("pause")
    for seed in range(50, 56):
        mini.add(prompt(5, seed=seed), count=1)
        mini.run()
    mini.settle()
    assert mini.manager.stats.stored == 0
    asked(mini, "resume")
    for seed in range(60, 66):
        mini.add(prompt(5, seed=seed), count=1)
        mini.run()
    mini.settle()
    assert mini.manager.stats.stored > 0, "this test shows nothing"
    nothing_held(mini)


@pytest.mark.parametrize("last", ["pause", "resume"])
def test_a_reset_leaves_it_as_it_was_asked_to_be_last(last: str) -> None:
    mini = Mini(store="eager")
    asked(mini, "pause")
    asked(mini, last)
    assert mini.scheduler.reset_prefix_cache()
    mini.add(prompt(6, seed=1), count=1)
    mini.run()
    mini.settle()
    assert mini.manager.stats.stored == (6 if last == "resume" else 0)


@pytest.mark.parametrize(("paused", "loaded"), [(False, 1), (True, 0)])
def test_the_last_block_of_a_prompt_is_not_loaded_while_it_is_paused(
    paused: bool, loaded: int
) -> None:
    mini = Mini(load_mode="auto")
    tokens = prompt(6, seed=1, tail=0)
    mini.only_in_cpu(tokens)
    mini.add(tokens[: 5 * BLOCK + 1], count=1)
    mini.run()
    before = mini.manager.stats.loaded
    if paused:
        mini.ask("pause")
    mini.add(tokens, count=2)
    mini.run()
    mini.settle()
    assert mini.manager.stats.loaded - before == loaded
    mini.check()
    nothing_held(mini)


def test_what_is_under_way_when_it_is_paused_ends() -> None:
    mini = Mini(load_mode="parked", late=3)
    tokens = prompt(6, seed=1)
    mini.only_in_cpu(tokens)
    name = mini.add(tokens)
    mini.step()
    assert mini.tier.counts().parked_now == 1
    mini.ask("pause")
    mini.run()
    mini.check()
    assert mini.hits[name] == 6 * BLOCK
    nothing_held(mini)


def test_an_emptied_tier_has_nothing_and_what_was_loaded_meanwhile_is_right() -> None:
    mini = Mini(load_mode="parked", late=3, store="eager")
    tokens = prompt(6, seed=1)
    mini.only_in_cpu(tokens)
    name = mini.add(tokens)
    mini.step()
    one = mini.ask("empty")
    mini.run()
    mini.check()
    assert one.result == {"forgotten_blocks": 6} and mini.manager.num_used == 0
    assert mini.hits[name] == 6 * BLOCK
    assert hits(mini, tokens) == 6 * BLOCK, "it is on the GPU, and is stored again"
    mini.settle()
    assert mini.manager.num_used == 6
    asked(mini, "empty")
    assert removed(mini) == {"emptied": 12}
    mini.pool.free_blocks(mini.pool.get_new_blocks(mini.pool.get_num_free_blocks()))
    assert hits(mini, tokens) == 0
    nothing_held(mini)


@pytest.mark.parametrize("wipe", [False, True])
def test_what_is_forgotten_is_overwritten_if_it_is_to_be(wipe: bool) -> None:
    mini = Mini(load_mode="parked", late=3, store="eager", wipe=wipe)
    tokens = prompt(6, seed=1)
    mini.only_in_cpu(tokens)
    name = mini.add(tokens)
    mini.step()
    assert mini.tier.counts().parked_now == 1, "its load is under way"
    asked(mini, "empty")
    assert any(map(any, mini.device.slots)) != wipe
    mini.run()
    mini.check()
    assert mini.hits[name] == 6 * BLOCK, "and is right all the same"
    assert hits(mini, prompt(6, seed=2)) == 0
    mini.settle()
    assert any(map(any, mini.device.slots)), "new blocks are stored again"
    before = mini.manager.num_used
    mini.scheduler.reset_prefix_cache()
    assert any(map(any, mini.device.slots)) != wipe
    assert removed(mini) == {"emptied": 6, "reset": before}
    nothing_held(mini)


def test_a_smaller_tier_keeps_what_fits_and_grows_again() -> None:
    mini = Mini(num_slots=20)
    first, second = prompt(8, seed=1), prompt(8, seed=2)
    mini.only_in_cpu(first, second)
    asked(mini, "resize", gib=8.5 * SIZE)
    assert (mini.manager.num_slots, mini.manager.num_used) == (8, 8)
    found = [mini.manager.lookup(key) for key in list(mini.manager._slot_of)]
    assert found == ["cpu"] * 8
    assert removed(mini) == {"resized": 8}
    hits(mini, first)
    hits(mini, second)
    asked(mini, "resize", gib=20 * SIZE)
    assert mini.manager.num_slots == 20
    mini.only_in_cpu(first, second)
    assert hits(mini, first) == hits(mini, second) == 8 * BLOCK
    nothing_held(mini)


@pytest.mark.parametrize(
    ("slots", "why"),
    [
        (0.5, "expected at least a block, 0.000977 GiB, found 0.000488281 GiB; give "),
        (21, "expected 0.02 GiB at most, which this engine mapped when it started, found "),
    ],
)
def test_a_size_that_cannot_be_is_refused_and_nothing_changes(slots: float, why: str) -> None:
    mini = Mini(num_slots=20)
    assert asked(mini, "resize", gib=slots * SIZE).error.startswith(why)
    assert mini.manager.num_slots == 20 and not mini.breaker.detached


def test_where_calls_come_beside_steps_no_size_is_changed_while_one_is_under_way() -> None:
    """A step that was sent before may be carried out after it, and use slots that are gone."""
    mini = Mini(num_slots=20, in_flight=2, asynchronous=False)
    mini.ranks.beside_steps = True
    mini.add(prompt(3, seed=1), count=20)
    mini.begin_step()
    refused = mini.ask("resize", gib=8 * SIZE)
    mini.begin_step()
    assert refused.done.is_set()
    assert refused.error.startswith("expected no step under way, because workers of Ray's ")
    assert refused.error.count("found 1; ") == 1
    assert mini.manager.num_slots == 20 and not mini.breaker.detached
    mini.run()
    assert not asked(mini, "resize", gib=8 * SIZE).error
    assert mini.manager.num_slots == 8
    nothing_held(mini)


def test_a_refusal_names_the_option_where_one_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    mini = Mini(num_slots=20)
    assert "larger KVOFFLOAD_CPU_GIB to have" in asked(mini, "resize", gib=21 * SIZE).error
    monkeypatch.setenv("KVOFFLOAD_OPTIONS", "KVOFFLOAD_CPU_GIB")
    assert "larger --cpu-gib to have" in asked(mini, "resize", gib=21 * SIZE).error


def test_a_size_that_there_is_no_memory_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: FakeRanks, more: int) -> None:
        raise TierRefused(f"no memory for {more}")

    monkeypatch.setattr(FakeRanks, "check_room", full)
    mini = Mini(num_slots=20)
    assert not asked(mini, "resize", gib=8 * SIZE).error
    assert asked(mini, "resize", gib=20 * SIZE).error == "no memory for 12"
    assert mini.manager.num_slots == 8 and not mini.breaker.detached


@pytest.mark.parametrize("store", ["eager", "auto"])
def test_settings_change_what_the_tier_does(store: str) -> None:
    mini = Mini(load_mode="inline", log_interval=1000.0, store=store, weighs=False)
    tokens = prompt(6, seed=1)
    mini.only_in_cpu(tokens)
    given = {"eviction": "lru", "load_mode": "parked", "log_interval": 5.0, "max_stall_ms": 1.5}
    asked(mini, "set", **given)
    assert type(mini.manager._prefixes.policy) is POLICIES["lru"]
    assert mini.desk is not None
    assert mini.desk.status()["settings"] == {**given, "gpu_prefixes": "auto"}
    assert hits(mini, tokens) == 6 * BLOCK
    assert (mini.tier.counts().inline, mini.tier.counts().parked) == (0, 1)
    assert mini.tier._report._interval == 5.0
    asked(mini, "set", load_mode="inline")
    mini.pool.free_blocks(mini.pool.get_new_blocks(mini.pool.get_num_free_blocks()))
    assert hits(mini, tokens) == 6 * BLOCK
    assert (mini.tier.counts().inline, mini.tier.counts().parked) == (1, 1)
    assert mini.desk.status()["settings"]["eviction"] == "lru"
    assert mini.desk.status()["stores_lazily"] is (store == "auto"), "nothing weighs it here"


def test_an_idle_engine_carries_out_what_is_asked_when_it_is_woken() -> None:
    """By an abort of no request, which vLLM's engine core carries out at once."""
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.request import RequestStatus

    mini, waiting = Mini(), queue.Queue[Any]()
    wake = control.waker(SimpleNamespace(input_queue=waiting))
    desk = Desk(mini.breaker, mini.manager, mini.ranks, {}, wake)  # type: ignore[arg-type]
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(desk.answer(Command("pause", {}))))
    asking.start()
    kind, names = waiting.get(timeout=10)
    assert (kind, names) == (EngineCoreRequestType.ABORT, [])
    mini.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
    asking.join(10)
    assert answers[0]["state"] == "paused" and mini.tier.paused


def test_an_engine_in_its_user_s_process_has_no_queue_and_its_next_step_looks() -> None:
    control.waker(SimpleNamespace())()


def test_nothing_is_changed_while_vllm_changes_its_queues() -> None:
    mini = Mini()
    one, seen = mini.ask("pause"), list[bool]()
    mini.breaker._depth = 1
    mini.breaker.on_finish([])
    seen.append(one.done.is_set())
    mini.breaker._depth = 0
    mini.breaker.on_finish([])
    assert [*seen, one.done.is_set()] == [False, True]


def test_nothing_is_changed_within_a_step_though_vllm_aborts_a_request_then() -> None:
    """As with structured outputs, where a step is sampled from when the one before is taken in."""
    mini = Mini(in_flight=2)
    mini.add([5] * 40, count=4)
    mini.begin_step()
    one = mini.ask("pause")
    mini.abort("nobody")
    assert not one.done.is_set(), "the ranks may have computed, and not sampled yet"
    mini.begin_step()
    assert one.done.is_set(), "before the next step"
    other = mini.ask("resume")
    mini.end_step()
    mini.abort("nobody")
    assert not other.done.is_set()
    mini.end_step()
    assert other.done.is_set(), "an engine that has no more to do schedules nothing"
    mini.run()
    mini.check()


def test_a_step_that_hangs_changes_nothing_and_status_says_since_when(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "CONTROL_TAKE_S", 0.05)
    mini = Mini()
    desk = Desk(mini.breaker, mini.manager, mini.ranks, {}, lambda: None)  # type: ignore[arg-type]
    with pytest.raises(Refused, match="found that it did not; nothing was changed"):
        desk.answer(Command("pause", {}))
    assert desk.answer(Command("status", {}))["seconds_since_step"] >= 0.05
    hits(mini, prompt(2, seed=1))
    assert not mini.tier.paused and desk.status()["seconds_since_step"] < 30


@pytest.mark.parametrize("in_flight", [1, 2])
def test_status_tells_a_step_that_has_not_ended_from_an_idle_engine(in_flight: int) -> None:
    mini = Mini(in_flight=in_flight)
    mini.ask("resume")
    assert mini.desk.status()["steps_under_way"] == 0
    mini.add(prompt(2, seed=1), count=20)
    for number in range(in_flight):
        mini.begin_step()
        assert mini.desk.status()["steps_under_way"] == number + 1
    mini.run()
    assert mini.desk.status()["steps_under_way"] == 0


def test_a_command_that_is_given_up_while_the_step_looks_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is taken back on the thread that asks, between the engine's look and its grip."""

    class GivenUp(deque[Any]):
        def popleft(self) -> Any:
            self.clear()
            return super().popleft()

    mini = Mini()
    monkeypatch.setattr(mini.breaker, "asked", GivenUp())
    mini.ask("pause")
    assert hits(mini, prompt(2, seed=1)) == 0 and not mini.breaker.failure
    assert mini.desk is not None and mini.desk.status()["state"] == "on"


def closed() -> bool:
    return False


def test_a_command_whose_client_has_gone_is_withdrawn_before_the_engine_takes_it_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At once, and not when a step that hangs is given up: others may be waiting to ask."""
    monkeypatch.setattr(control, "CONTROL_LOOK_S", 0.01)
    mini = Mini()
    desk = Desk(mini.breaker, mini.manager, mini.ranks, {}, lambda: None)  # type: ignore[arg-type]
    with pytest.raises(Refused, match="nothing was changed"):
        desk.answer(Command("pause", {}, closed))
    assert not mini.breaker.asked
    hits(mini, prompt(2, seed=1))
    assert not mini.tier.paused and caplog.text.count("one who asked to pause") == 1


def test_an_engine_that_was_stopped_carries_out_nothing_that_nobody_waits_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Who waits for it was stopped with it, and has not looked since the client has gone."""
    mini = Mini()
    one = mini.ask("pause")
    one.command = one.command._replace(wanted=closed)
    other = mini.ask("empty")
    mini.begin_step()
    mini.end_step()
    assert "connection closed before the engine took it up" in one.error and other.error == ""
    assert not mini.tier.paused and not mini.breaker.detached
    assert "nothing was changed" in caplog.text


def test_a_change_that_takes_too_long_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "CONTROL_TAKE_S", 0.01)
    monkeypatch.setattr(control, "CONTROL_APPLY_S", 0.01)
    mini = Mini()
    wake = mini.breaker.asked.clear  # as if the engine's thread had taken it
    desk = Desk(mini.breaker, mini.manager, mini.ranks, {}, wake)  # type: ignore[arg-type]
    with pytest.raises(Refused, match="found it still under way"):
        desk.answer(Command("empty", {}))


def test_a_policy_that_is_not_installed_is_refused_and_nothing_changes() -> None:
    mini = Mini()
    mini.only_in_cpu(prompt(4, seed=1))
    before = mini.tier.settings
    assert "nobodys" in asked(mini, "set", eviction="nobodys", log_interval=7.0).error
    assert mini.tier.settings == before and not mini.breaker.detached
    assert hits(mini, prompt(4, seed=1)) == 4 * BLOCK


@pytest.mark.parametrize("method", ["pause", "empty", "resize", "change"])
def test_a_fault_is_the_answer_and_the_engine_serves_on_without_the_tier(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise LookupError("made to fail")

    mini = Mini()
    mini.only_in_cpu(prompt(4, seed=1))
    monkeypatch.setattr(mini.tier, method, fail)
    values = {"resize": {"gib": SIZE}, "change": {"load_mode": "inline"}}
    one = mini.ask("set" if method == "change" else method, **values.get(method, {}))
    behind = mini.ask("resume")
    assert hits(mini, prompt(4, seed=1)) == 0
    assert "LookupError('made to fail'); the CPU tier is detached" in one.error
    assert "made to fail" in mini.breaker.failure and mini.breaker.detached
    assert mini.desk is not None and mini.desk.status()["state"] == "failed"
    assert mini.desk.status()["reason"].endswith("; restart the server to have the CPU tier again")
    assert behind.error == "" or "found it detached" in behind.error
    with pytest.raises(Refused, match="found it detached: .*made to fail"):
        mini.desk.answer(Command("pause", {}))


def test_what_was_asked_when_the_engine_shuts_down_is_answered() -> None:
    mini = Mini()
    one = mini.ask("pause")
    mini.breaker.close()
    assert one.error == (
        "expected a tier that works, found it detached: the engine shuts down; restart the server."
    )


def test_metrics_have_the_state_and_the_labels() -> None:
    mini = Mini(load_mode="auto")
    front_end = reported(mini)
    version = next(labels for name, labels in front_end.values if name == "build_info")
    asked(mini, "pause")
    front_end.drain()
    assert (front_end["tier_state paused"], front_end["tier_state on"]) == (1, 0)
    asked(mini, "resume")
    asked(mini, "set", eviction="lru", load_mode="inline")
    front_end.drain()
    assert (front_end["tier_state paused"], front_end["tier_state on"]) == (0, 1)
    infos = {labels: value for (name, labels), value in front_end.values.items() if "info" in name}
    assert infos == {version: 0, (*version[:2], "inline", version[3], "lru", *version[5:]): 1}


def woken(mini: Mini, front_end: FrontEnd, name: str, **values: Any) -> None:
    """Ask an engine that has nothing to do; what it sends arrives."""
    one = mini.ask(name, **values)
    mini.breaker.answer_asked()
    assert one.done.is_set() and not one.error
    front_end.drain()


def test_metrics_have_the_size_that_a_command_has_left_an_idle_engine() -> None:
    mini = Mini()
    front_end = reported(mini)
    mini.only_in_cpu(prompt(6, seed=1))
    held = mini.manager.num_used
    assert held > 4
    woken(mini, front_end, "resize", gib=4 * SIZE)
    assert front_end["capacity_blocks"] == 4 and front_end["used_blocks"] == 4
    assert front_end["removed_blocks resized"] == held - 4
    woken(mini, front_end, "empty")
    assert front_end["used_blocks"] == 0 and front_end["removed_blocks emptied"] == 4
    records = front_end.records
    woken(mini, front_end, "pause")
    woken(mini, front_end, "pause")
    assert front_end.records == records + 1, "nothing is sent where nothing has changed"


def test_a_command_for_an_engine_at_work_sends_no_figures_beside_its_steps() -> None:
    mini = Mini()
    front_end = reported(mini)
    mini.only_in_cpu(prompt(6, seed=1))
    mini.add(prompt(6, seed=2), count=20)
    mini.step()
    records = front_end.records
    woken(mini, front_end, "empty")
    assert front_end.records == records
    mini.run()
    assert front_end["removed_blocks emptied"] > 0


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("kvoffload_patch.control.folder.SHARED", tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def core() -> Any:
    parallel = SimpleNamespace(data_parallel_rank=0, data_parallel_index=1)  # as without experts
    model = SimpleNamespace(served_model_name="a model")
    config = SimpleNamespace(model_config=model, parallel_config=parallel)
    return SimpleNamespace(vllm_config=config, input_queue=queue.Queue())


@pytest.mark.usefixtures("runtime")
def test_an_engine_core_listens_until_it_shuts_down() -> None:
    mini, engine_core = Mini(), core()
    mini.only_in_cpu(prompt(4, seed=1))
    parts: Any = (mini.breaker, mini.manager, mini.ranks)
    control.listen(engine_core, *parts, ["states that nobody has seen"])
    (engine,) = client.find()
    found = client.ask(engine, "status")
    assert found["unverified"] == ["states that nobody has seen"]
    assert (found["state"], found["model"], found["copies"]) == ("on", "a model", "by hand")
    assert (found["capacity_blocks"], found["used_blocks"], found["stored_blocks"]) == (400, 4, 4)
    assert found["used_bytes"] == 4 * SLOT_BYTES and found["largest_blocks"] == 400
    assert found["load_ms_per_block"] == mini.ranks.load_ms_per_block
    assert found["stale_loras"] == []
    assert found["number"] == 1
    engine_core.vllm_config.parallel_config = SimpleNamespace(data_parallel_rank=2)
    assert engine_number(engine_core.vllm_config) == 2, "before 0.14"
    mini.view.loras.stale.update("ba")
    assert client.ask(engine, "status")["stale_loras"] == ["a", "b"]
    control.close_socket(engine_core)
    control.close_socket(engine_core)
    assert client.find() == []


def test_who_asks_an_engine_that_is_being_dropped_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket is taken away by the thread that collects it, beside that of who asks."""
    asking: list[Any] = []

    def listener(ask: Any) -> Any:
        asking.append(ask)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(control, "Listener", listener)
    mini = Mini()
    desk = Desk(mini.breaker, mini.manager, mini.ranks, {}, lambda: None)  # type: ignore[arg-type]
    desk.open()
    (ask,) = asking
    assert ask(Command("status", {}))["state"] == "on"
    mini.breaker.answer_asked = int  # which has it as well
    del desk
    gc.collect()
    with pytest.raises(Refused, match="found it gone"):
        ask(Command("status", {}))


@pytest.mark.usefixtures("runtime")
def test_an_engine_that_is_dropped_is_not_kept_by_its_socket() -> None:
    mini, engine_core = Mini(), core()
    control.listen(engine_core, mini.breaker, mini.manager, mini.ranks)  # type: ignore[arg-type]
    gone, (engine,) = weakref.ref(mini.breaker), client.find()
    assert client.ask(engine, "status")["state"] == "on"
    del mini, engine_core
    until = time.monotonic() + 60
    while gone() is not None:  # the thread that has answered may still have it
        assert time.monotonic() < until
        gc.collect()
    assert client.find() == [] and not list(engine.path.parent.parent.iterdir())


@pytest.mark.parametrize("found", [OSError("no space"), Refused("no folder"), LookupError("a bug")])
def test_without_a_socket_the_tier_works_and_says_so(
    found: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(answer: Any) -> Any:
        raise found

    texts = list[str]()
    monkeypatch.setattr(control, "Listener", fail)
    monkeypatch.setattr(control.logger, "warning", lambda text, *a: texts.append(text % a))
    mini, engine_core = Mini(), core()
    control.listen(engine_core, mini.breaker, mini.manager, mini.ranks)  # type: ignore[arg-type]
    assert str(found) in texts[0] and "no control socket" in texts[0]
    assert isinstance(found, Refused) or "start the server with another XDG_RUN" in texts[0]
    control.close_socket(engine_core)


def test_loads_that_cannot_be_checked_first_are_not_switched_on() -> None:
    """Where all blocks have checksums a step begins only when they were compared."""
    mini = Mini(integrity="full", load_mode="parked")
    for mode in ("inline", "auto"):
        refusal = asked(mini, "set", load_mode=mode).error
        assert f"is {mode!r} and this engine's KVOFFLOAD_INTEGRITY is 'full'" in refusal
    assert asked(mini, "set", load_mode="parked").error == ""
    assert mini.tier.settings.load_mode == "parked" and not mini.breaker.detached


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("compares", [True, False])
def test_a_status_says_whether_any_load_is_compared(overlap: bool, compares: bool) -> None:
    """Those within the step are not; `auto` parks some for it alone on a CPU."""
    ranks = FakeRanks(copies_overlap=overlap, compares=compares)
    mini = Mini(load_mode="auto", integrity="sample", ranks=ranks)
    for mode, parked in (("auto", True), ("parked", True), ("inline", False)):
        asked(mini, "set", load_mode=mode)
        assert mini.desk is not None
        status = mini.desk.status()
        assert (status["integrity"], status["compares"]) == ("sample", parked and compares)
        assert status["compares"] == mini.tier._admission.comparing.active


def test_a_tier_that_has_failed_has_nothing() -> None:
    mini = Mini()
    mini.only_in_cpu(list(range(3 * 16 + 1)))
    working = mini.ask("pause") and mini.desk.status()
    assert (working["store"], working["used_blocks"]) == (mini.tier.settings.store, 3)
    mini.breaker.failed("by hand", LookupError("made to fail"))
    mini.breaker.begin_schedule()
    failed = mini.desk.status()
    assert failed["state"] == "failed" and failed["stored_blocks"] == 3
    names = ("capacity_blocks", "used_bytes", "queued_loads", "queued_stores", "parked_requests")
    assert [failed[name] for name in names] == [0] * 5


def test_many_names_do_not_make_an_answer_too_long() -> None:
    mini = Mini()
    mini.view.loras.stale.update(f"adapter-{n:05}" for n in range(3000))
    mini.ask("pause")
    told = mini.desk.status()["stale_loras"]
    assert len(told) == 21 and told[0] == "adapter-00000" and told[-1] == "and 2980 more"


def test_a_command_is_not_carried_out_on_a_tier_that_has_failed() -> None:
    mini = Mini()
    asked_for = mini.ask("empty")
    mini.breaker._depth += 1  # as within a call of vLLM's
    mini.breaker.failed("by hand", LookupError("made to fail"))
    mini.breaker._depth -= 1
    mini.breaker.begin_schedule()
    assert "found it detached: by hand" in asked_for.error and mini.breaker.detached
