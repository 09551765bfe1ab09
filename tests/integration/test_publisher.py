"""Records become metrics of prometheus_client, in one process and in several."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from kvoffload_patch.integration import metrics
from kvoffload_patch.integration import publisher as module

ROOT = Path(__file__).resolve().parents[2]

# What each of several front ends is given: (record, engine), by process.
PUBLISH = """
import prometheus_client, sys
from kvoffload_patch.integration.publisher import Publisher
publisher = Publisher()
for record, engine in {records!r}:
    publisher.publish(record, engine)
registry = prometheus_client.REGISTRY
if {several}:
    from prometheus_client import multiprocess
    registry = prometheus_client.CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
sys.stdout.write(prometheus_client.generate_latest(registry).decode())
"""


def record(*values: Any) -> dict[str, Any]:
    return {"model_name": "m", "values": [list(value) for value in values]}


def publish(records: list[Any], folder: Path | None = None) -> dict[str, float]:
    """What /metrics of a process says after these records."""
    env = {k: v for k, v in os.environ.items() if k != "PROMETHEUS_MULTIPROC_DIR"}
    if folder is not None:
        env["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    code = PUBLISH.format(records=records, several=folder is not None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(metrics.PREFIX)]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


LABELS = 'engine="{}",model_name="m"'


def test_every_kind_of_metric_is_published() -> None:
    found = publish(
        [
            (record(("hit_tokens", [], 5), ("used_blocks", [], 7)), 1),
            (record(("hit_tokens", [], 2), ("used_blocks", [], 3)), 1),
            (record(("copy_seconds", ["load"], [0.03, 0.3])), 0),
            (record(("nobody_knows_this", [], 1)), 0),
        ]
    )
    engine = LABELS.format(1)
    assert found[f"kvoffload_hit_tokens_total{{{engine}}}"] == 7
    assert found[f"kvoffload_used_blocks{{{engine}}}"] == 3
    load = 'direction="load",engine="0"'
    assert found[f'kvoffload_copy_seconds_bucket{{{load},le="0.05",model_name="m"}}'] == 1
    assert found[f'kvoffload_copy_seconds_count{{{load},model_name="m"}}'] == 2


def test_several_front_ends_say_the_same(tmp_path: Path) -> None:
    publish([(record(("hit_tokens", [], 5), ("used_blocks", [], 7)), 0)], tmp_path)
    found = publish([(record(("hit_tokens", [], 2), ("used_blocks", [], 3)), 0)], tmp_path)
    assert found[f"kvoffload_hit_tokens_total{{{LABELS.format(0)}}}"] == 7
    assert found[f"kvoffload_used_blocks{{{LABELS.format(0)}}}"] == 3


def test_a_record_that_cannot_be_taken_in_ends_the_metrics_and_raises_nothing() -> None:
    bad = record(("hit_tokens", ["too", "many"], 1))
    found = publish(
        [(record(("hit_tokens", [], 5)), 0), (bad, 0), (record(("hit_tokens", [], 1)), 0)]
    )
    assert found[f"kvoffload_hit_tokens_total{{{LABELS.format(0)}}}"] == 5


def test_what_ends_the_metrics_is_said_once_with_what_to_do(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_make", lambda metric: None)
    publisher = module.Publisher()
    for _ in range(2):
        publisher.publish({"model_name": "m"}, 0)
    (line,) = caplog.messages
    assert "stand still: KeyError('values'); " in line and line.endswith("to have them again.")


TOGETHER = """
import threading, time
from kvoffload_patch.integration import publisher as module

as_made, publisher = module._make, module.Publisher()

def make(metric):
    time.sleep(0.002)
    return as_made(metric)

module._make = make
record = {record!r}
threads = [threading.Thread(target=publisher.publish, args=(record, at)) for at in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not publisher._failed
"""


def test_two_engines_of_a_process_may_tell_of_themselves_at_once() -> None:
    """As two LLMs of a user do, each of which has a thread that takes in what its engine sends."""
    code = TOGETHER.format(record=record(("hit_tokens", [], 5)))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
