"""The tier of a scheduler whose GPU blocks lose their memory once nobody references them.

A copy reads or writes GPU memory after the step that planned it. So every block of a copy stays
referenced until the copy is done: kvcached's pool neither evicts nor frees a referenced block.
Blocks that it evicts are looked at as those that are handed out.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from kvoffload_patch.integration.engine.adapters.elastic_pool import TransferRefs
from kvoffload_patch.integration.engine.adapters.vllm_scheduler import SchedulerView
from kvoffload_patch.integration.engine.tier import SchedulerTier
from kvoffload_patch.plan import TransferPlan, TransferResult
from kvoffload_patch.tier.manager import OffloadManager


class ElasticTier(SchedulerTier):
    """Arguments and attributes are those of `SchedulerTier`."""

    def __init__(self, view: SchedulerView, manager: OffloadManager, *args: Any) -> None:
        super().__init__(view, manager, *args)
        self._refs = TransferRefs(view.adapter, view.pool.blocks)
        view.adapter.tell_evicted(self.handed_out.append)

    def _after_admissions(self, output: Any) -> None:
        # What was held for loads is given up within, and the plan is made after that.
        self._refs.keep(self._manager.loads_to_plan)
        super()._after_admissions(output)

    def _make_plan(self, output: Any, computed: Mapping[Hashable, int]) -> TransferPlan | None:
        plan = super()._make_plan(output, computed)
        if plan is not None:
            self._refs.keep(plan.before)
            self._refs.keep(plan.after)
        return plan

    def on_result(self, result: TransferResult) -> None:
        """As of any tier; what is done is referenced no more."""
        super().on_result(result)
        self._refs.give_back(self._manager.last_done)

    def reset(self) -> None:
        """As of any tier: every copy is done, and vLLM resets no cache that has a block in use."""
        super().reset()
        self._refs.give_back(self._manager.last_done)
