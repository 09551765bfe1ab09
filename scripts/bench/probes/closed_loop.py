"""Requests to an engine, so many at a time: the next begins when one is answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scripts.bench.serve.load import ask

# The name of a request, its prompt, and how many tokens it is answered with.
Asked = tuple[str, list[int], int]


class ClosedLoop:
    """So many clients, each of which asks again as soon as it is answered.

    Args:
        engine: a `vllm.LLMEngine`.
        at_once: clients.
        ask: makes a request.
    """

    def __init__(self, engine: Any, at_once: int, ask: Callable[[], Asked]) -> None:
        self._engine, self._ask = engine, ask
        self._free = at_once

    @property
    def busy(self) -> bool:
        """Whether any request is not answered."""
        return bool(self._engine.has_unfinished_requests())

    def fill(self, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Every client without a request asks, one by one, for as long as it goes on."""
        while self._free and goes_on():
            self._free -= 1
            ask(self._engine, *self._ask())

    def step(self) -> list[Any]:
        """What the engine has answered next."""
        outputs: list[Any] = self._engine.step()
        self._free += sum(output.finished for output in outputs)
        return outputs

    def drain(self) -> None:
        """Return when every request is answered."""
        while self.busy:
            self.step()
