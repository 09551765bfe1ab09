"""Requests that reach the engine while its thread waits for a step, seen before vLLM takes them.

vLLM gives the scheduler what has come when a step's output is taken in, and by then the next step
is under way: the load of such a request would begin one step later than it can.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from typing import Any

from kvoffload_patch.integration.engine.breaker import Breaker
from kvoffload_patch.integration.engine.tuning import ARRIVALS_POLL_S
from kvoffload_patch.integration.engine.workers import RankGroup


def watch(engine_core: Any, breaker: Breaker, ranks: RankGroup) -> None:
    """Look for requests whenever the engine waits for a step, if there is a time at which it does.

    Args:
        engine_core: a `vllm.v1.engine.core.EngineCore`. One without an input queue, which is in the
            process of its user, has nothing that waits.
        breaker: of its scheduler.
        ranks: open.
    """
    queue = getattr(engine_core, "input_queue", None)
    if queue is not None:
        from vllm.v1.engine import EngineCoreRequestType

        arrivals = Arrivals(queue, EngineCoreRequestType.ADD, breaker)
        ranks.while_waiting(arrivals.watch)


class Arrivals:
    """Tells the tier of requests in the engine's input queue, which are left there.

    Args:
        queue: a `queue.Queue` of (kind, what), as vLLM's input thread fills it; of kind ``add`` it
            holds (request, wave).
        add: the kind of a new request.
        breaker: whose tier is told.
    """

    def __init__(self, queue: Any, add: Any, breaker: Breaker) -> None:
        self._queue = queue
        self._add = add
        self._breaker = breaker

    def watch(self, is_over: Callable[[], bool]) -> None:
        """Tell of what is in the queue and what comes, until this says that the step is over."""
        told = 0  # nobody takes anything out meanwhile
        while not is_over():
            if len(self._queue.queue) > told:
                told += self._tell(told)
            else:
                time.sleep(ARRIVALS_POLL_S)

    def _tell(self, told: int) -> int:
        with self._queue.mutex:
            came = list(islice(self._queue.queue, told, None))
        requests = [what[0] for kind, what in came if kind == self._add]
        if requests:
            self._breaker.look_ahead(requests)
        return len(came)
