"""What a step can still admit: run slots, tokens and GPU blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvoffload_patch.integration.engine.adapters.vllm_lora import adapters_of
from kvoffload_patch.integration.engine.adapters.vllm_scheduler import SchedulerView
from kvoffload_patch.integration.engine.tuning import LOOK_AHEAD_REQUESTS


class AdmissionBudget:
    """What this step can still admit, as vLLM will count it.

    The blocks that running requests take first are bounded without a look at each of them; they
    are counted, once, only when the bound leaves it open whether a request fits.

    Args:
        view: the scheduler.
        parked: parked requests, each of which will take a run slot.
        reserved_blocks: blocks that they will need besides those that are held for them.

    Attributes:
        requests: run slots left.
        tokens: of the step that are left.
        blocks: left on the GPU before running requests take theirs.
        admissible: requests that `schedule` may admit so far, parked ones not included.
        adapters: of LoRA, of which a step may have so many; None without.
        reserved: whether some of the room is kept for requests that wait, of which vLLM knows not.
        needed: blocks that the request asked for last needs.
        taken: blocks that running requests and those before the next one are given, at most.
    """

    def __init__(self, view: SchedulerView, parked: int = 0, reserved_blocks: int = 0) -> None:
        self._view = view
        self._exact = False
        self.requests = view.free_run_slots() - parked
        tokens, self._for_running = view.demand_of_running()
        self._headroom = self.taken = self._for_running
        self.tokens = int(view.scheduler.max_num_scheduled_tokens) - tokens
        self.blocks = view.num_free_blocks() - reserved_blocks
        self._tokens_for_one = view.prompt_tokens_in_step()
        self._watermark = view.watermark_blocks()
        if view.scheduler.running:
            self._keep_watermark()
        self._ahead = LOOK_AHEAD_REQUESTS
        self.adapters = adapters_of(view.scheduler)
        self.needed = self.admissible = 0
        self.reserved = parked > 0

    @property
    def full(self) -> bool:
        """Whether run slots or blocks are used up."""
        return self.requests <= 0 or self.blocks <= 0

    def out_of_tokens(self, look_ahead: bool) -> bool:
        """Whether no further request is looked up for want of tokens.

        Args:
            look_ahead: whether requests may be parked behind the step's last token, some of them.
        """
        return self.tokens <= 0 and not (look_ahead and self._ahead)

    def has_tokens(self, request: Any, hit_tokens: int) -> bool:
        """Whether `schedule` has tokens for a request: one, or all if it may not split prompts."""
        needed = 1 if self._view.splits_prompts else self._tokens_of(request, hit_tokens)
        return needed <= self.tokens

    def fits(self, request: Any, hit_tokens: int, gpu_blocks: Sequence[Any]) -> bool:
        """Whether a request can be admitted; `admit` or `reserve` then takes what it needs.

        Args:
            request: of vLLM.
            hit_tokens: that need not be computed.
            gpu_blocks: that it hits.
        """
        # It may not take in its later steps what is kept for others.
        tokens = int(request.num_tokens)
        if not self.reserved:
            tokens = self._view.tokens_to_fit(request, hit_tokens)
        self.needed = self._view.blocks_for(tokens, hit_tokens)
        if self.needed > self.blocks - self._for_running:
            self.needed -= sum(1 for block in gpu_blocks if block.ref_cnt)
        return self.requests > 0 and self.has(self.needed)

    def leaves_headroom(self) -> bool:
        """Whether running requests find a block each besides what `fits` was asked for last.

        If not in this step, each takes one in one of the next, while a load is under way.
        """
        return self.needed <= self.blocks - self._headroom

    def has(self, num_blocks: int) -> bool:
        """Whether so many blocks are left."""
        open_yet = self.blocks - self._for_running < num_blocks <= self.blocks
        if open_yet and not self._exact:
            self._exact = True
            self._for_running = self._view.count_blocks_for_running()
        return num_blocks <= self.blocks - self._for_running

    def admit(self, request: Any, hit_tokens: int) -> None:
        """Admit the request of which `needed` is, as `fits` leaves it."""
        # Beside reserved room it leaves the head-room that it asks for once it runs.
        self._take(self.needed + self._view.decode_blocks * self.reserved)
        if self.adapters is not None:
            self.adapters.admit(request)
        self.admissible += 1
        self.tokens -= self._tokens_of(request, hit_tokens)
        self._keep_watermark()

    def resume(self, request: Any) -> None:
        """`schedule` comes to this request before those behind it, which could take its room."""
        computed = int(request.num_computed_tokens)
        todo = max(0, self._view.tokens_to_fit(request, computed) - computed)
        self.needed = self._view.groups.new_blocks(request, todo)
        self.admit(request, computed)

    def reserve(self, num_blocks: int) -> None:
        """A request waits for a load: it takes blocks and a run slot, but none of the tokens."""
        self.reserved = True
        self._take(num_blocks)

    def pass_over(self) -> None:
        """The request that `fits` was asked for last waits; it keeps its room and head-room."""
        self.reserve(self.needed + self._headroom)
        self._headroom = self._view.decode_blocks  # of this one, beside the next

    def _take(self, num_blocks: int) -> None:
        if self.tokens <= 0:
            self._ahead -= 1
        self.blocks -= num_blocks
        self.taken += num_blocks
        self.requests -= 1

    def _tokens_of(self, request: Any, hit_tokens: int) -> int:
        begins = self._view.groups.computed_from(hit_tokens)
        return min(max(1, int(request.num_tokens) - begins), self._tokens_for_one)

    def _keep_watermark(self) -> None:
        """From the second request on: vLLM leaves these blocks free beside one that runs."""
        self.blocks -= self._watermark
        self._watermark = 0
