"""Spans of a real server, as a collector gets them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from engine import release
from engine.collector import Collector, Span
from engine.model import write_model
from engine.server import MAX_TOKENS, Server

pytest.importorskip("vllm.tracing.otel", reason="up to 0.15 an engine core has no tracer")

BLOCK = min(32, release.block_size())
PROMPT_TOKENS = 300
FULL = PROMPT_TOKENS // BLOCK * BLOCK
# The GPU's cache holds the blocks of one prompt.
SMALL = ["--num-gpu-blocks-override", str(MAX_TOKENS // BLOCK + 2), "--max-num-seqs", "1"]
SMALL += ["--block-size", str(BLOCK)]
OURS = ("kvoffload.lookup", "kvoffload.load")
AT_ONCE = {"OTEL_BSP_SCHEDULE_DELAY": "100"}  # ms, in place of 5 s
TIMEOUT_S = 30.0
PARENT = "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("traced"))


def prompts() -> list[list[int]]:
    """The first comes back when the others have thrown it out of the GPU's cache."""
    rng = random.Random(7)
    some = [[rng.randrange(3, 1000) for _ in range(PROMPT_TOKENS)] for _ in range(3)]
    return [*some, some[0]]


def ask(server: Server) -> list[str]:
    """Ask all, each in a trace of its own; the traces."""
    traces = [f"{number:032x}" for number in range(1, len(prompts()) + 1)]
    for trace, tokens in zip(traces, prompts()):
        server.ask(tokens, traceparent=f"00-{trace}-{PARENT}-01")
    return traces


def figure(server: Server) -> float:
    """Tokens that requests found in the tier, as /metrics says."""
    name = "kvoffload_hit_tokens_total"
    return next(value for key, value in server.metrics().items() if key.startswith(name))


@pytest.mark.features  # tests/integration/engine/reports/test_spans.py has spans without a server
def test_a_server_that_traces_has_a_span_of_the_tier_in_each_trace(
    model: Path, tmp_path: Path
) -> None:
    with Collector() as collector:
        options = [*SMALL, "--otlp-traces-endpoint", collector.endpoint]
        with Server(model, tmp_path / "log", options, AT_ONCE) as server:
            traces = ask(server)

            def all_there(spans: list[Span]) -> bool:
                names = [span.name for span in spans]
                return min(names.count("llm_request"), sum(map(names.count, OURS))) >= len(traces)

            assert collector.wait_for(all_there, TIMEOUT_S), collector.spans
            hits = figure(server)
    ours, theirs = collector.named(*OURS), collector.named("llm_request")
    assert [span.name for span in ours] == [OURS[0]] * 3 + [OURS[1]]
    assert [span.trace_id for span in ours] == [span.trace_id for span in theirs] == traces
    for span, request in zip(ours, theirs):
        assert span.parent_id == request.parent_id == PARENT
        assert request.begin <= span.begin <= span.end <= request.end
        assert span.process == "engine_core"
        asked = span.attributes["gen_ai.request.id"]
        assert asked.startswith(request.attributes["gen_ai.request.id"])
        assert span.attributes["kvoffload.queried_tokens"] == PROMPT_TOKENS
        assert set(span.attributes) == {
            "gen_ai.request.id", "kvoffload.queried_tokens", "kvoffload.hit_tokens",
        }  # fmt: skip
    assert hits == FULL
    assert [span.attributes["kvoffload.hit_tokens"] for span in ours] == [0, 0, 0, FULL]


@pytest.mark.features
def test_without_vllms_tracing_the_tier_sends_none(model: Path, tmp_path: Path) -> None:
    """Though the engine core has a tracer: this variable makes vLLM tell how it started."""
    with Collector() as collector:
        env = {**AT_ONCE, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": collector.endpoint}
        with Server(model, tmp_path / "log", SMALL, env) as server:
            ask(server)
            hits = figure(server)
    assert hits == FULL, "the tier is there"
    assert "engine_core" in {span.process for span in collector.spans}, "and spans arrive"
    assert collector.named(*OURS, "llm_request") == []
