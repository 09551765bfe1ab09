"""What keeps vLLM from admitting a request in a random run though there is room for it."""

from __future__ import annotations

import inspect
import random
from types import SimpleNamespace
from typing import Any


class Waits:
    """As the seed says: grammars that are being compiled, images under way, steps without prompts.

    Attributes:
        works: any of this happens.
        grammars: requests that waited for one.
        passed_over: times that vLLM has passed over a request after its lookup.
        throttled: steps in which no prompt was to be begun, as beside other data-parallel engines.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"waits {seed}")
        self.works = seed // 4 % 2 == 1
        self._without_grammar: list[Any] = []
        self.grammars = self.passed_over = self.throttled = 0

    def asked(self, request: Any) -> None:
        """A request has come, and may wait for a grammar."""
        if self.works and self._rng.random() < 0.15:
            request.status = _grammar_status(type(request.status))
            request.structured_output_request = SimpleNamespace(grammar=None)
            self._without_grammar.append(request)
            self.grammars += 1

    def disturb(self, mini: Any) -> None:
        """Perhaps do something, between two steps."""
        if not self.works:
            return
        mini.scheduler.structured_output_manager = _AnyGrammar()
        if self._without_grammar and self._rng.random() < 0.4:
            self._compiled(self._rng.randrange(len(self._without_grammar)))
        if hasattr(mini.scheduler, "_ec_transfer_pending"):
            mini.scheduler._ec_transfer_pending = self._refuse
        can = "throttle_prefills" in inspect.signature(type(mini.scheduler).schedule).parameters
        throttled = can and self._rng.random() < 0.3
        mini.how = {"throttle_prefills": True} if throttled else {}
        self.throttled += throttled

    def over(self, mini: Any) -> None:
        """Nothing keeps anybody waiting any more."""
        mini.how = {}
        mini.scheduler.__dict__.pop("_ec_transfer_pending", None)
        while self._without_grammar:
            self._compiled(0)

    def _compiled(self, which: int) -> None:
        self._without_grammar.pop(which).structured_output_request.grammar = object()

    def _refuse(self, *_: Any) -> bool:
        refused = self._rng.random() < 0.2
        self.passed_over += refused
        return refused


class _AnyGrammar:
    """A manager of grammars that take every token."""

    def accept_tokens(self, *_: Any) -> bool:
        return True

    def validate_tokens(self, _: Any, tokens: Any) -> Any:
        return tokens

    def should_advance(self, *_: Any, **__: Any) -> bool:
        """Up to 0.29 the grammar itself takes them, where this says so."""
        return False

    def grammar_bitmask(self, *_: Any) -> None:
        """Up to 0.11.0 a step is scheduled with it."""


def _grammar_status(known: Any) -> Any:
    name = "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"  # from 0.19 on
    return known[name if name in known.__members__ else "WAITING_FOR_FSM"]
