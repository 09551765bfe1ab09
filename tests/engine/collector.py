"""A collector of OpenTelemetry spans on loopback, over gRPC as vLLM sends them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any, NamedTuple

import pytest

grpc = pytest.importorskip("grpc")
pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="vLLM exports no spans here")
messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
services = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc")


class Span(NamedTuple):
    """What has arrived of one span.

    Attributes:
        process: that its tracer names, as ``vllm.process_kind`` of its resource.
        trace_id, parent_id: hexadecimal; no parent is the empty string.
        begin, end: nanoseconds since the epoch.
    """

    name: str
    process: str
    trace_id: str
    parent_id: str
    begin: int
    end: int
    attributes: dict[str, Any]


class Collector(services.TraceServiceServicer):  # type: ignore[misc]
    """Listens within the ``with``, and keeps what it is sent."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._arrived = threading.Condition()
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
        services.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Collector:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait(10)

    def Export(self, request: Any, _: Any) -> Any:
        """Take spans in; the answer says that all were taken."""
        found = [
            _read(span, _plain(of.resource.attributes))
            for of in request.resource_spans
            for scope in of.scope_spans
            for span in scope.spans
        ]
        with self._arrived:
            self.spans += found
            self._arrived.notify_all()
        return messages.ExportTraceServiceResponse()

    def wait_for(self, enough: Callable[[list[Span]], bool], timeout_s: float) -> bool:
        """Whether what has arrived is enough within a time."""
        with self._arrived:
            return self._arrived.wait_for(lambda: enough(self.spans), timeout_s)

    def named(self, *names: str) -> list[Span]:
        """What has arrived under these names, in the order of its begin."""
        with self._arrived:
            return sorted((span for span in self.spans if span.name in names), key=_begin)


def _read(span: Any, resource: dict[str, Any]) -> Span:
    return Span(
        span.name, resource.get("vllm.process_kind", ""), span.trace_id.hex(),
        span.parent_span_id.hex(), span.start_time_unix_nano, span.end_time_unix_nano,
        _plain(span.attributes),
    )  # fmt: skip


def _plain(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def _begin(span: Span) -> int:
    return span.begin
