"""A real Prometheus, where one is installed, answers every question of the dashboard."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from kvoffload_patch.cli.bench.server import free_port

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0

# What an engine that works and one that was refused would send, again and again.
EXPORT = """
import sys, time
import prometheus_client
from kvoffload_patch.integration.metrics import METRICS, REFUSED
from kvoffload_patch.integration.publisher import publish

def labels(metric):
    rows = [[]]
    for _, values in metric.labels:
        rows = [row + [value] for row in rows for value in values or ("x",)]
    return rows

prometheus_client.start_http_server(int(sys.argv[1]), "127.0.0.1")
while True:
    values = [[m.name, row, [0.1] if m.kind == "histogram" else 1] for m in METRICS
              for row in labels(m) if m.name != "tier_off_info"]
    publish({"model_name": "m", "values": values}, 0)
    off = [["tier_state", [REFUSED], 1], ["tier_off_info", ["why"], 1]]
    publish({"model_name": "m", "values": off}, 1)
    time.sleep(0.2)
"""
CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs:
- job_name: vllm
  static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of one that has scraped a few times."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed")
    folder, exporter, port = tmp_path_factory.mktemp("prometheus"), free_port(), free_port()
    (folder / "config.yml").write_text(CONFIG.format(port=exporter))
    commands = [
        [sys.executable, "-c", EXPORT, str(exporter)],
        [
            program,
            f"--config.file={folder}/config.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
            f"--web.console.templates={folder}",
            f"--web.console.libraries={folder}",
        ],
    ]
    with ExitStack() as started, (folder / "log").open("wb") as log:
        for command in commands:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
            started.callback(process.wait, timeout=30)
            started.callback(process.terminate)
        address, until = f"http://127.0.0.1:{port}", time.monotonic() + WAIT_S
        while not answers(address, "count_over_time(kvoffload_growing[1m]) >= 3"):
            assert time.monotonic() < until, (folder / "log").read_text()[-4000:]
            time.sleep(0.5)
        yield address


def answers(address: str, expression: str) -> list[object]:
    """What it answers now; nothing while it starts."""
    query = urllib.parse.urlencode({"query": expression})
    with suppress(ConnectionError, urllib.error.URLError):
        try:
            with urllib.request.urlopen(f"{address}/api/v1/query?{query}", timeout=10) as page:
                found: list[object] = json.load(page)["data"]["result"]
                return found
        except urllib.error.HTTPError as refusal:
            if refusal.code != 503:  # it is starting
                raise AssertionError(f"{expression}: {refusal.read().decode()}") from refusal
    return []


def filled_in(expression: str) -> str:
    """A panel's expression as Grafana sends it with every model and engine chosen."""
    text = expression.replace("$__rate_interval", "30s")
    return re.sub(r"\$\w+", ".*", text)


def test_every_panel_has_an_answer(prometheus: str) -> None:
    dashboard = json.loads((ROOT / "docs/grafana.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            assert answers(prometheus, filled_in(target["expr"])), (panel["title"], target["expr"])


def test_every_question_of_the_page_is_one_that_prometheus_understands(prometheus: str) -> None:
    rows = re.findall(r"^\| [^|]*\? \| (.*) \|$", (ROOT / "docs/metrics.md").read_text(), re.M)
    asked = [text for row in rows for text in re.findall(r"`([^`]+)`", row)]
    assert len(asked) > 4
    for expression in asked:
        answers(prometheus, expression)  # raises where it does not parse
