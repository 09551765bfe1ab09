"""How long the step under way still takes, and when loads will have crossed the bus.

With asynchronous scheduling a step is scheduled when the one before has just begun. What it reads
may still cross meanwhile: it waits for its bytes on the device, and nobody waits longer if they
come before it begins.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from kvoffload_patch.integration.engine.tuning import (
    KEPT_PREFILL_PARTS,
    LAYERED_LOAD_MS,
    LONGER_LOAD_TIMES,
    PREFILL_TOKENS,
)


class Pace:
    """Estimates from the times of calls; none of them decides what is right.

    Args:
        ms_per_block: time that a block takes to load, measured when the tier was opened.
        overlap: which part of a load may be on its way when the step that reads it begins, once
            loads come by layer.
        now: seconds on a clock that never goes back. All else here is in milliseconds.

    Attributes:
        ms_per_block: the same as it is lately: others may use the bus, or the host be late.
        slowdown: that in times of the time when the tier was opened.
        in_flight: steps that were scheduled and whose output has not come back.
        by_layer: the forward pass waits for loads layer by layer, as the last output has said.
        ms_per_token: time that one of a prompt takes to compute, lately; 0: not known.
    """

    def __init__(
        self,
        ms_per_block: float,
        overlap: float = 0.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ms_per_block = self._ms_when_opened = ms_per_block
        self.slowdown = 1.0
        self._overlap = overlap
        self._now = now
        self.in_flight = 0
        self.by_layer = False
        self.ms_per_token = 0.0
        # Outputs of steps under way that compute prompts, when they were about to be scheduled, and
        # their tokens. The next output that comes back ends those before it, which were lost.
        self._prefills = deque[tuple[Any, float, int]]()
        self._prefilled = (0.0, 0.0)  # time and tokens of the last ones
        self._returned = 0.0  # the last output
        self._began = 0.0  # the last one was about to be scheduled
        self._steps = (0.0, 0.0)  # between the last three
        self._bus_free_at = 0.0

    def _now_ms(self) -> float:
        return 1000 * self._now()

    def loads_take(self, slowdown: float) -> None:
        """Loads take so many times what they took when the tier was opened."""
        self.slowdown, self.ms_per_block = slowdown, self._ms_when_opened * slowdown

    def step_begins(self) -> None:
        """`schedule` is about to be called."""
        now = self._now_ms()
        self._steps = self._steps[1], now - self._began
        self._began = now

    def step_scheduled(self, output: Any, waits: bool) -> None:
        """`schedule` has returned this; ``waits``: the step waits for loads, too."""
        self.in_flight += 1
        tokens = output.total_num_scheduled_tokens
        if tokens >= PREFILL_TOKENS and not waits:
            self._prefills.append((output, self._began, tokens))

    def step_returned(self, output: Any) -> None:
        """What `schedule` returned was carried out; steps come back in their order."""
        self.in_flight -= 1
        now = self._now_ms()
        begun = self._prefills
        if begun and (begun[0][0] is output or any(one is output for one, _, _ in begun)):
            while (first := self._prefills.popleft())[0] is not output:
                pass  # lost
            ms, tokens = self._prefilled
            ms = KEPT_PREFILL_PARTS * ms + now - max(first[1], self._returned)
            tokens = KEPT_PREFILL_PARTS * tokens + first[2]
            self._prefilled = ms, tokens
            self.ms_per_token = ms / tokens
        self._returned = now

    def computes_sooner(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether so many tokens take clearly less to compute than these blocks of them to load.

        False as long as it is not known what a token takes.
        """
        computing_ms = self.ms_per_token * num_tokens
        return 0 < LONGER_LOAD_TIMES * computing_ms < self.ms_per_block * num_blocks

    def free_ms(self) -> float:
        """For how long the step about to be scheduled will not begin: the shorter of two before it.

        0 if no step is under way: the device waits for this one.
        """
        return min(self._steps) if self.in_flight > 0 else 0.0

    def hidden_ms(self, num_blocks: int) -> float:
        """How long so many blocks may still be loading when the step that reads them begins.

        Nobody waits then if a layer's KV is there when its turn comes: as the load brings layer
        after layer, and so does the step, no longer than either of them takes. The step is taken to
        compute for as long as the shorter of the two before.
        """
        if not self.by_layer:
            return 0.0
        return self._overlap * min(*self._steps, self.ms_per_block * num_blocks)

    def load_begins(self, num_blocks: int) -> float:
        """A load of so many blocks begins, behind those under way; returns when it will be over."""
        begins = max(self._now_ms(), self._bus_free_at)
        self._bus_free_at = begins + self.ms_per_block * num_blocks
        return self._bus_free_at

    def awaits_layers(self) -> bool:
        """Whether a step that reads the loads begun so far had better wait for them by layer.

        One of decodes alone waits for them as a whole, and is over sooner after that.
        """
        return self.by_layer and self.ms_until(self._bus_free_at) > LAYERED_LOAD_MS

    def ms_until(self, at: float) -> float:
        """How long it is until a time; 0 if it has passed."""
        return max(0.0, at - self._now_ms())
