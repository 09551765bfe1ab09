"""Spans of requests, in vLLM's traces: there where its tracing is on, and nothing elsewhere."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.tracing.otel")
pytest.importorskip("opentelemetry.sdk.trace")

from integration.engine.world import World, prompt
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvoffload_patch.integration.engine.reports import spans

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
PROMPT = prompt(3, seed=1)


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What vLLM's tracer gives its spans to."""
    found, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(found))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return found


def traced(world: World) -> World:
    """As an engine whose configuration has an endpoint."""
    config = SimpleNamespace(otlp_traces_endpoint="http://nowhere:4317")
    world.scheduler.vllm_config = SimpleNamespace(observability_config=config, lora_config=None)
    world.tier._hits._spans = spans.spans_of(world.scheduler)
    return world


def ask(world: World, tokens: list[int], headers: dict[str, str] | None = None) -> Any:
    request = world.add(tokens)
    request.trace_headers = headers
    world.step(request)
    return request


def test_a_request_that_hits_has_a_span_in_its_trace(exporter: InMemorySpanExporter) -> None:
    world = World(load_mode="inline")
    world.only_in_cpu(PROMPT)
    request = ask(traced(world), PROMPT, HEADERS)
    (span,) = exporter.get_finished_spans()
    assert span.name == "kvoffload.load"
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert f"{span.parent.span_id:016x}" == PARENT_ID
    assert dict(span.attributes) == {
        "gen_ai.request.id": request.request_id,
        "kvoffload.queried_tokens": 13,
        "kvoffload.hit_tokens": 12,
    }
    assert 0 <= span.end_time - span.start_time < 60 * 10**9


def test_a_request_that_finds_nothing_has_one_too(exporter: InMemorySpanExporter) -> None:
    world = traced(World())
    ask(world, PROMPT)
    (span,) = exporter.get_finished_spans()
    assert span.name == "kvoffload.lookup" and span.attributes["kvoffload.hit_tokens"] == 0
    assert span.parent is None


def test_a_span_begins_with_the_first_lookup(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(load_mode="parked")
    world.only_in_cpu(PROMPT)
    traced(world)
    times = iter([1000, 5000])
    monkeypatch.setattr(spans.time, "time_ns", lambda: next(times))
    request = world.add(PROMPT)
    request.trace_headers = HEADERS
    world.step()
    world.all_done()
    world.step(request)
    (span,) = exporter.get_finished_spans()
    assert (span.start_time, span.end_time) == (1000, 5000)


def test_an_engine_without_an_endpoint_makes_none(exporter: InMemorySpanExporter) -> None:
    world = World()
    config = SimpleNamespace(otlp_traces_endpoint=None)
    world.scheduler.vllm_config = SimpleNamespace(observability_config=config, lora_config=None)
    assert spans.spans_of(world.scheduler) is None
    ask(world, PROMPT, HEADERS)
    assert not exporter.get_finished_spans()


def test_off_it_imports_nothing() -> None:
    code = (
        "import sys; from types import SimpleNamespace as N\n"
        "from kvoffload_patch.integration.engine.reports.spans import spans_of\n"
        "off = N(vllm_config=N(observability_config=N(otlp_traces_endpoint=None)))\n"
        "assert spans_of(off) is None and spans_of(N()) is None\n"
        "assert not [m for m in sys.modules if m.startswith(('opentelemetry', 'vllm'))]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_releases_whose_engine_core_has_no_tracer_make_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.tracing.otel", None)
    config = SimpleNamespace(otlp_traces_endpoint="http://nowhere:4317")
    vllm_config = SimpleNamespace(observability_config=config)
    assert spans.spans_of(SimpleNamespace(vllm_config=vllm_config)) is None


def test_a_tracer_that_raises_is_said_once_and_the_tier_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = traced(World())

    def give(*args: Any, **kwargs: Any) -> None:
        raise OSError("the exporter is gone")

    world.tier._hits._spans._give = give
    ask(world, PROMPT)
    ask(world, prompt(2, seed=3))
    assert not world.breaker.detached and world.breaker._failure is None
    assert len([one for one in caplog.records if "no more spans" in one.getMessage()]) == 1
