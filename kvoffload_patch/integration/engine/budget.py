"""What one step can still admit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvoffload_patch.integration.engine.vllm_scheduler import SchedulerView

# Requests behind the step's last token for which loads are begun already.
_LOOK_AHEAD = 16


class AdmissionBudget:
    """What this step can still admit, as vLLM will count it.

    The blocks that running requests take first are bounded without a look at each of them; they
    are counted, once, only when the bound leaves it open whether a request fits.

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
        tokens, self._for_running = view.demand_of_running()
        self.tokens = int(view.scheduler.max_num_scheduled_tokens) - tokens
        self.blocks = view.num_free_blocks() - reserved_blocks
        self._tokens_for_one = view.prompt_tokens_in_step()
        self._watermark = view.watermark_blocks()
        if view.scheduler.running:
            self._keep_watermark()
        self._ahead = _LOOK_AHEAD
        self.needed = 0
        self.admissible = 0

    @property
    def full(self) -> bool:
        """Whether run slots or blocks are used up."""
        return self.requests <= 0 or self.blocks <= 0

    def out_of_tokens(self, look_ahead: bool) -> bool:
        """Whether `schedule` has no tokens for more; ``look_ahead``: nor shall more be parked."""
        return self.tokens <= 0 and not (look_ahead and self._ahead)

    def has_tokens(self, request: Any, hit_tokens: int) -> bool:
        """Whether `schedule` has tokens for a request: one, or all if it may not split prompts."""
        needed = 1 if self._view.splits_prompts else self._tokens_of(request, hit_tokens)
        return needed <= self.tokens

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
        self.tokens -= self._tokens_of(request, hit_tokens)
        self._keep_watermark()

    def reserve(self, num_blocks: int) -> None:
        """A request waits for its load: it takes blocks and a run slot, but none of the tokens."""
        if self.tokens <= 0:
            self._ahead -= 1
        self.blocks -= num_blocks
        self.requests -= 1

    def _tokens_of(self, request: Any, hit_tokens: int) -> int:
        return min(max(1, int(request.num_tokens) - hit_tokens), self._tokens_for_one)

    def _keep_watermark(self) -> None:
        """From the second request on: vLLM leaves these blocks free beside one that runs."""
        self.blocks -= self._watermark
        self._watermark = 0
