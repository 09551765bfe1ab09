"""Figures of a tier on their way to the front end."""

from __future__ import annotations

import itertools
import queue
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from integration.engine.mini import BLOCK, FakeRanks, Mini

from kvoffload_patch.integration import carrier
from kvoffload_patch.integration.engine.reports import metrics
from kvoffload_patch.integration.metrics import BY_NAME, FAILED, ON, PAUSED, REFUSED
from kvoffload_patch.links import FAILURES, LATE, LOAD, MISMATCH, STORE

BLOCK_BYTES = 1000
ABOUT = {
    "load_mode": "auto", "store": "auto", "eviction": "adaptive", "integrity": "off",
    "copies": "by hand",
}  # fmt: skip


class FrontEnd:
    """Takes in the records of one engine core, from its queue and from the steps' outputs."""

    def __init__(self, mini: Mini) -> None:
        self.queue: queue.Queue[Any] = queue.Queue()
        self.core = SimpleNamespace(
            scheduler=mini.scheduler,
            output_queue=self.queue,
            vllm_config=SimpleNamespace(model_config=SimpleNamespace(served_model_name="m")),
        )
        self.values: dict[tuple[str, tuple[str, ...]], Any] = {}
        self.records = self.steps = 0
        update = mini.scheduler.update_from_output

        def watched(*args: Any) -> Any:
            outputs = update(*args)
            self.steps += 1
            self.drain()  # what was sent meanwhile is in the queue before what the step returns
            for one in outputs.values():
                self.take(one)
            return outputs

        mini.scheduler.update_from_output = watched

    def take(self, outputs: Any) -> None:
        """As `Publisher.publish`."""
        record = getattr(outputs.scheduler_stats, carrier.FIELD, None)
        if record is None:
            return
        self.records += 1
        assert record["model_name"] == "m"
        for name, labels, value in record["values"]:
            key = name, tuple(labels)
            empty: Any = [] if BY_NAME[name].kind == "histogram" else 0
            before = empty if BY_NAME[name].kind == "gauge" else self.values.get(key, empty)
            self.values[key] = before + value

    def drain(self) -> None:
        """Take in what was sent outside of a step."""
        while not self.queue.empty():
            client, outputs = self.queue.get_nowait()
            assert client == 0
            self.take(outputs)

    def __getitem__(self, key: str) -> Any:
        name, *labels = key.split()
        return self.values[name, tuple(labels)]


def reported(mini: Mini) -> FrontEnd:
    """The tier's reporter is on, and what it sends at start has arrived."""
    front_end = FrontEnd(mini)
    metrics.begin(front_end.core, mini.breaker, mini.manager, BLOCK_BYTES, ABOUT)
    front_end.drain()
    return front_end


def prompt(blocks: int, seed: int) -> list[int]:
    return list(range(1000 * seed, 1000 * seed + blocks * BLOCK + 1))


@pytest.fixture(autouse=True)
def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interval never ends within a test."""
    monkeypatch.setattr(metrics, "METRICS_INTERVAL_S", 1e9)


def test_everything_is_there_before_the_first_request() -> None:
    found = reported(Mini())
    names = {name for name, _ in found.values}
    assert set(BY_NAME) - names == {"tier_off_info"}
    assert (found["tier_state on"], found["tier_state failed"]) == (1, 0)
    assert found["capacity_blocks"] == 400 and found["capacity_bytes"] == 400 * BLOCK_BYTES
    for metric in BY_NAME.values():
        known = [values for _, values in metric.labels]
        sent = {labels for name, labels in found.values if name == metric.name}
        assert not known or not all(known) or sent == set(itertools.product(*known)), metric.name


def test_what_a_command_changes_when_the_last_step_ends_is_said_last() -> None:
    """What a step returns reaches the front end after what was sent while it was taken in."""
    mini = Mini(store="eager")
    found = reported(mini)
    mini.add(prompt(3, seed=1), count=1)
    mini.begin_step()
    one = mini.ask("empty")
    mini.end_step()
    found.drain()
    assert one.result == {"forgotten_blocks": 3} and mini.manager.num_used == 0
    assert (found["used_blocks"], found["removed_blocks emptied"]) == (0, 3)


@pytest.mark.parametrize("load_mode", ["inline", "parked"])
def test_figures_are_those_of_the_tier_when_the_engine_is_idle(load_mode: str) -> None:
    mini = Mini(load_mode=load_mode)
    found = reported(mini)
    mini.only_in_cpu(prompt(3, seed=1), prompt(2, seed=2))
    mini.add(prompt(3, seed=1), count=8)
    mini.run()
    mini.check()
    stats = mini.manager.stats
    assert stats.loaded == 3 and stats.stored >= 5
    assert found["loaded_blocks"] == stats.loaded and found["stored_blocks"] == stats.stored
    assert found["stored_bytes"] == stats.stored * BLOCK_BYTES
    assert found["loaded_tokens"] == found["hit_tokens"] == 3 * BLOCK
    assert found["recomputed_tokens"] == found["queried_tokens"] - found["hit_tokens"] > 0
    assert found["queried_tokens"] == sum(len(p) for p in mini.prompts.values())
    assert found["used_blocks"] == mini.manager.num_used
    assert found[f"loading_requests {load_mode}"] == 1
    assert found["parked_requests"] == 0 and found["load_slowdown"] == 1
    assert found["stalled_seconds"] == 0, "nobody else was there"
    waits = found["parked_seconds"]
    assert len(waits) == (load_mode == "parked") and all(0 < wait < 60 for wait in waits)
    assert found["copies load"] == len(found["copy_seconds load"]) == 1
    assert all(0 < seconds < 60 for seconds in found["copy_seconds load"])
    (rate,) = found["copy_bytes_per_second load"]
    assert rate == pytest.approx(3 * BLOCK_BYTES / found["copy_seconds load"][0])


def test_what_was_not_moved_is_told_in_blocks_and_in_bytes() -> None:
    mini = Mini()
    found = reported(mini)
    stats = mini.manager.stats
    stats.overwritten, stats.decode, stats.held = 2, 3, 5
    stats.removed["resized"] = 17
    stats.add_failed(LOAD, MISMATCH, 7)
    stats.add_failed(STORE, LATE, 11)
    stats.add_failed(STORE, LATE, 13)
    mini.add(prompt(1, seed=1))
    mini.run()
    expected = {
        "dropped no_room": 0, "dropped overwritten": 2, "dropped few_uses": 0,
        "dropped decode": 3, "dropped opted_out": 0, "dropped paused": 0,
        "skipped held": 5,
        "removed resized": 17, "removed reset": 0,
        "failed load mismatch": 7, "failed load late": 0, "failed store late": 24,
    }  # fmt: skip
    for key, number in expected.items():
        name, _, labels = key.partition(" ")
        assert found[f"{name}_blocks {labels}"] == number, key
        assert found[f"{name}_bytes {labels}"] == number * BLOCK_BYTES, key
    copies = {labels: n for (name, labels), n in found.values.items() if name == "failed_copies"}
    assert len(copies) == 2 * len(FAILURES)
    assert {labels: number for labels, number in copies.items() if number} == {
        ("load", MISMATCH): 1, ("store", LATE): 2,
    }  # fmt: skip


def test_what_others_wait_for_is_summed() -> None:
    mini = Mini(load_mode="inline", ranks=FakeRanks(load_ms_per_block=2.0))
    found = reported(mini)
    mini.only_in_cpu(prompt(3, seed=1))
    mini.add(prompt(2, seed=3), count=12)
    mini.step()
    mini.add(prompt(3, seed=1))
    mini.run()
    mini.check()
    assert found["loading_requests inline"] == 1
    assert found["stalled_seconds"] == pytest.approx(3 * 0.002), "one ran, three blocks came"


def test_a_record_goes_with_the_first_step_of_an_interval_and_with_the_last_of_all() -> None:
    mini = Mini()
    found = reported(mini)
    mini.add(prompt(2, seed=1), count=1)
    mini.run()  # begins the interval
    before, steps = found.records, found.steps
    mini.add(prompt(2, seed=2), count=20)
    mini.run()
    assert found.steps - steps >= 20
    assert found.records - before == 1


def test_nothing_is_read_where_statistics_are_off() -> None:
    mini = Mini()
    mini.scheduler.log_stats = False
    front_end = FrontEnd(mini)
    metrics.begin(front_end.core, mini.breaker, mini.manager, BLOCK_BYTES, ABOUT)
    metrics.tell_off(front_end.core, REFUSED, "why")
    assert mini.breaker.reporter is None and front_end.queue.empty()


def test_a_tier_that_fails_says_so_and_nothing_more() -> None:
    mini = Mini()
    found = reported(mini)
    mini.add(prompt(2, seed=1))
    mini.tier.after_schedule = lambda output: 1 / 0
    mini.run()
    found.drain()
    assert mini.breaker.detached
    assert (found["tier_state on"], found["tier_state failed"]) == (0, 1)
    assert found["capacity_blocks"] == 0
    ((reason,),) = [labels for name, labels in found.values if name == "tier_off_info"]
    assert reason.startswith("after_schedule: ZeroDivisionError: ")
    assert reason.endswith("; restart the server to have the CPU tier again")


def test_a_refusal_is_told_with_its_reason() -> None:
    found = FrontEnd(Mini(tier=False))
    metrics.tell_off(found.core, REFUSED, "because")
    found.drain()
    assert found["tier_state refused"] == 1 and found["tier_off_info because"] == 1
    assert found[f"tier_state {ON}"] == found[f"tier_state {FAILED}"] == 0


def test_a_reporter_that_fails_is_not_asked_again() -> None:
    mini = Mini()
    reported(mini)
    calls = []

    def counts() -> Any:
        calls.append(1)
        raise AttributeError("made to fail")

    mini.tier.counts = counts
    for seed in range(3):
        mini.add(prompt(2, seed), count=1)
        mini.run()
    mini.check()
    assert len(calls) == 1 and not mini.breaker.detached


@pytest.mark.parametrize("method", ["planned", "look"])
def test_times_of_copies_that_cannot_be_counted_are_no_fault_of_the_tier(method: str) -> None:
    mini = Mini()
    reported(mini)
    calls = []

    def fails(*_: Any) -> None:
        calls.append(1)
        raise AttributeError("made to fail")

    assert mini.breaker.reporter is not None
    setattr(mini.breaker.reporter._times, method, fails)
    for seed in range(3):
        mini.add(prompt(2, seed), count=1)
        mini.run()
    mini.check()
    assert len(calls) == 1 and not mini.breaker.detached


def test_an_engine_in_the_front_ends_process_publishes_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvoffload_patch.integration import publisher

    published: list[Any] = []
    monkeypatch.setattr(publisher, "publish", lambda *args: published.append(args))
    mini = Mini()
    front_end = FrontEnd(mini)
    del front_end.core.output_queue
    metrics.begin(front_end.core, mini.breaker, mini.manager, BLOCK_BYTES, ABOUT)
    mini.add(prompt(2, seed=1), count=1)
    mini.run()
    assert len(published) == 2 and front_end.records == 0
    assert all(engine == 0 for _, engine in published)


@pytest.mark.parametrize("where", ["look", "planned"])
def test_figures_that_cannot_be_taken_are_told_once_and_none_is_sent_any_more(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A front end would add up what was sent in halves."""
    warned: list[str] = []
    monkeypatch.setattr(metrics.logger, "warning", lambda text, *a, **_: warned.append(text % a))
    mini = Mini()
    front_end, reporter = reported(mini), mini.breaker.reporter
    assert reporter is not None
    calls: list[int] = []

    def fail(*_: Any) -> None:
        calls.append(1)
        raise LookupError("made to fail")

    monkeypatch.setattr(reporter._times, where, fail)
    mini.add(list(range(4 * BLOCK)))
    mini.run()
    records = front_end.records
    reporter.changed(PAUSED, {})
    mini.breaker.failed("by hand", LookupError("made to fail"))
    mini.add(list(range(500, 500 + 4 * BLOCK)))
    mini.run()
    mini.check()
    front_end.drain()
    assert mini.breaker.detached and front_end.records == records
    assert len(calls) == len(warned) == 1 and "made to fail" in warned[0]


def test_a_command_is_carried_out_though_its_figures_cannot_be_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mini = Mini()
    reported(mini)

    def fail(*_: Any) -> None:
        raise LookupError("made to fail")

    monkeypatch.setattr(metrics.Reporter, "_labels", fail)
    asked = mini.ask("pause")
    mini.add(list(range(4 * BLOCK)))
    mini.run()
    assert asked.done.is_set() and not asked.error
    assert mini.tier.paused and not mini.breaker.detached
