"""The tier's figures in `prometheus_client`, as vLLM's own front end has them."""

from __future__ import annotations

import time
from collections.abc import Callable

TIMEOUT_S = 20.0


def figures(step: Callable[[], object]) -> dict[str, float]:
    """By name with labels, once there are any; meanwhile the engine is made to step."""
    import prometheus_client

    until = time.monotonic() + TIMEOUT_S
    found: dict[str, float] = {}
    while not found:
        assert time.monotonic() < until, "no figure came"
        step()
        text = prometheus_client.generate_latest().decode()
        lines = [line.rpartition(" ") for line in text.splitlines()]
        found = {name: float(value) for name, _, value in lines if name.startswith("kvoffload_")}
    return found
