"""What one step can still admit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvoffload_patch.integration.engine.vllm_scheduler import SchedulerView

# Requests behind the step's last token for which loads are begun already.
_LOOK_AHEAD = 16


class AdmissionBudget:
    """What this step can still admit, as vLLM will count it.

    The blocks that running requests take first are bounded in O(1); they are counted, once,
    only when the bound leaves it open whether a request fits.

    Args:
        view: the scheduler.
        parked: parked requests, each of which will take a run slot.
        reserved_blocks: blocks that they will need besides those that are held for them.

    Attributes:
        admissible: requests that `schedule` may admit so far, parked ones not included.
        needed: blocks that the request asked for last needs.
    """

    def __init__(self, view: SchedulerView, parked: int = 0, reserved_blocks: int = 0) -> None:
        self._view = view
        self._exact = False
        self.requests = view.free_run_slots() - parked
        self.tokens = view.token_budget()
        self.blocks = view.num_free_blocks() - view.watermark_blocks() - reserved_blocks
        self._ahead = _LOOK_AHEAD
        self._for_running = view.blocks_for_running()
        self.needed = 0
        self.admissible = 0

    @property
    def full(self) -> bool:
        """Whether run slots or blocks are used up."""
        return self.requests <= 0 or self.blocks <= 0

    def out_of_tokens(self, look_ahead: bool) -> bool:
        """Whether `schedule` has no tokens for more; ``look_ahead``: nor shall more be parked."""
        return self.tokens <= 0 and not (look_ahead and self._ahead)

    def fits(self, request: Any, hit_tokens: int, gpu_blocks: Sequence[Any]) -> bool:
        """Whether a request can be admitted; `admit` or `reserve` then takes what it needs."""
        self.needed = self._view.blocks_for(self._view.tokens_to_fit(request, hit_tokens))
        if self.needed > self.blocks - self._for_running:
            self.needed -= sum(1 for block in gpu_blocks if block.ref_cnt)
        return self.requests > 0 and self.has(self.needed)

    def has(self, num_blocks: int) -> bool:
        """Whether so many blocks are left."""
        open_yet = self.blocks - self._for_running < num_blocks <= self.blocks
        if open_yet and not self._exact:
            self._exact = True
            self._for_running = self._view.count_blocks_for_running()
        return num_blocks <= self.blocks - self._for_running

    def admit(self, request: Any, hit_tokens: int) -> None:
        """Admit the request that `fits` was asked for last."""
        self.reserve(self.needed)
        self.admissible += 1
        self.tokens -= max(1, request.num_tokens - hit_tokens)

    def reserve(self, num_blocks: int) -> None:
        """A request waits for its load: it takes blocks and a run slot, but none of the tokens."""
        if self.tokens <= 0:
            self._ahead -= 1
        self.blocks -= num_blocks
        self.requests -= 1
