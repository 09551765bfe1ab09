"""Publishes the records of engine cores where vLLM's own metrics are: in `prometheus_client`.

With several API servers each gets some of the records. vLLM then has `prometheus_client` keep its
values in files that all of them read; counters are added up, and of a gauge the latest counts.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from kvoffload_patch.integration.metrics import (
    BY_NAME,
    COMMON_LABELS,
    METRICS,
    PREFIX,
    STOPPED,
    Metric,
    Record,
)

logger = logging.getLogger("vllm.kvoffload_patch")


class Publisher:
    """The metrics of all engines whose records come to this process."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}  # metrics of prometheus_client, by name
        self._failed = False
        self._making = threading.Lock()  # engines of one process have a thread each that decodes

    def publish(self, record: Record, engine_index: int) -> None:
        """Take a record in; whatever fails ends the metrics, and nothing else."""
        if self._failed:
            return
        try:
            with self._making:
                if not self._made:
                    self._made = {metric.name: _make(metric) for metric in METRICS}
            common = (record["model_name"], str(engine_index))
            for name, labels, value in record["values"]:
                # The engine core may be of another version, on another machine.
                if name in BY_NAME:
                    _apply(BY_NAME[name].kind, self._made[name].labels(*common, *labels), value)
        except Exception as error:  # noqa: BLE001 - vLLM must not fail by a metric of ours
            self._failed = True
            logger.warning(STOPPED, error)


def _make(metric: Metric) -> Any:
    import prometheus_client

    kind: Any = getattr(prometheus_client, metric.kind.capitalize())
    more: dict[str, Any] = {}
    if metric.kind == "gauge":
        more["multiprocess_mode"] = "mostrecent"
    if metric.kind == "histogram":
        more["buckets"] = metric.buckets
    names = (*COMMON_LABELS, *metric.label_names)
    return kind(PREFIX + metric.name, metric.help, names, **more)


def _apply(kind: str, child: Any, value: Any) -> None:
    if kind == "gauge":
        child.set(value)
    elif kind == "counter":
        child.inc(value)
    else:
        for seen in value:
            child.observe(seen)


publish = Publisher().publish
