"""The list of metrics keeps to Prometheus's rules of naming, and what is said of it is true."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvoffload_patch.integration.metrics import BY_NAME, COMMON_LABELS, METRICS, PREFIX, Metric

DOCS = Path(__file__).resolve().parents[2] / "docs"
UNITS = ("tokens", "blocks", "bytes", "copies", "requests", "seconds", "bytes_per_second")
OTHERS = {
    "build_info",
    "tier_off_info",
    "tier_state",
    "growing",
    "load_slowdown",
    "gpu_prefix_ratio",
}
# Whose labels tell what is so.
TELLING = {"build_info", "tier_off_info", "tier_state"}
# What prometheus_client adds to a name.
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def published(metric: Metric) -> set[str]:
    """The names under which Prometheus has a metric."""
    return {PREFIX + metric.name + suffix for suffix in SUFFIXES[metric.kind]}


def row(metric: Metric) -> str:
    """The line of a metric in docs/metrics.md."""
    name = PREFIX + metric.name + ("_total" if metric.kind == "counter" else "")
    labels = "; ".join(
        f"`{label}`: {', '.join(values)}" if values else f"`{label}`"
        for label, values in metric.labels
    )
    return f"| `{name}` | {metric.kind} | {labels} | {metric.help} |"


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(METRICS)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_name_ends_with_its_unit(metric: Metric) -> None:
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", metric.name)
    assert metric.name.endswith(UNITS) != (metric.name in OTHERS)
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(metric.buckets)
    assert metric.help.endswith(".") and not set(metric.label_names) & {*COMMON_LABELS, "le"}


def test_what_is_counted_in_blocks_is_counted_in_bytes_as_well() -> None:
    for metric in METRICS:
        of, _, unit = metric.name.rpartition("_")
        if unit == "blocks":
            other = BY_NAME[f"{of}_bytes"]
            assert (other.kind, other.labels) == (metric.kind, metric.labels), metric.name
            assert METRICS.index(other) == METRICS.index(metric) + 1, "it says `the same in bytes`"


def test_the_page_has_a_row_for_each() -> None:
    page = (DOCS / "metrics.md").read_text()
    head = ["| Metric | Kind | Labels | What it is |", "| --- | --- | --- | --- |"]
    table = "\n".join([*head, *map(row, METRICS)])
    found = re.search(r"<!-- made by .* -->\n(.*)\n<!-- end -->", page, re.DOTALL)
    assert found is not None
    assert found[1] == table, f"the table is to be\n{table}"


def test_the_dashboard_asks_for_metrics_and_labels_that_exist() -> None:
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(asked) > 15
    known = {name: metric for metric in METRICS for name in published(metric)}
    named: set[str] = set()
    for expression in asked:
        found = re.findall(rf"{PREFIX}\w+", expression)
        assert found and set(found) <= set(known), expression
        named.update(known[name].name for name in found)
        labels = {*COMMON_LABELS, "le"}.union(*(known[name].label_names for name in found))
        by = [
            name
            for group in re.findall(r"by \(([^)]*)\)", expression)
            for name in group.split(", ")
        ]
        # Each server numbers its engines from 0 on.
        assert ("engine" in by) == ("instance" in by), expression
        selected = re.findall(r"(\w+)=", "".join(re.findall(r"{(.*?)}", expression)))
        assert set(by) | set(selected) <= labels | {"instance"}, expression
        # Of these, rows that hold no more stay at 0.
        told = {known[name].name for name in found}
        assert expression.endswith(" == 1") == bool(told & TELLING), expression
    not_shown = {"loaded_tokens", "loaded_blocks", "skipped_bytes"}
    not_shown |= {"capacity_blocks", "used_blocks"}
    assert set(BY_NAME) - named == not_shown


def test_what_a_panel_shows_has_the_panels_unit() -> None:
    """A gauge of 0 or 1 beside gibibytes is a line that nobody sees."""
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    words = {"bytes": "_bytes", "Bps": "_bytes", "s": "_seconds", "percentunit": "_ratio"}
    for panel in dashboard["panels"]:
        word = words.get(panel["fieldConfig"]["defaults"]["unit"])
        for expression in (target["expr"] for target in panel["targets"]):
            if word is not None and " / " not in expression:
                assert word in expression, panel["title"]


def test_the_pages_questions_are_about_metrics_that_exist() -> None:
    page = (DOCS / "metrics.md").read_text()
    known = {name for metric in METRICS for name in published(metric)}
    known |= {PREFIX + metric.name for metric in METRICS if metric.kind == "histogram"}
    found = set(re.findall(rf"{PREFIX}\w+", page)) - {PREFIX}
    assert len(found) > 20 and sorted(found - known) == []
