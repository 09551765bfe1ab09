"""Loads that arrive layer by layer, each as late as the gate allows, on the CPU device.

The CPU device copies at once and in one piece. This engine takes a load's bytes out of the GPU
blocks again, and puts a group of them back when a step waits for that group or a later one. A
layer that computes without waiting for its KV finds zeros there, which shows as a wrong token.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Sequence
from typing import Any

import torch
from model import LAYERS

from kvoffload_patch.links import LOAD
from kvoffload_patch.transfer import engine as copy_engine
from kvoffload_patch.transfer.backends.torch import TorchBackend

counts = {"steps by layer": 0, "waits for a group": 0}


class GroupsBackend(TorchBackend):
    """Says that it brings rows group by group."""

    def __init__(self, layout: Any, *args: Any) -> None:
        super().__init__(layout, *args)
        self.groups = tuple(layout.cut(LAYERS, 1))  # type: ignore[assignment]


class LateLayers(copy_engine.CopyEngine):
    """Stands in for `CopyEngine`."""

    deaf_to = -1  # a group whose waits do nothing: what a missing wait would do

    def __init__(self, layout: Any, backend: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(layout, backend, *args, **kwargs)
        self._rows, self._row_groups = layout.rows, backend.groups
        self._targets: dict[int, Sequence[int]] = {}
        self._away: tuple[torch.Tensor, list[torch.Tensor]] | None = None
        self._next = 0

    def begin_step(self, plan: Any, by_layer: bool = False) -> bool:
        """Carry out the plan, and take away what its last load has brought."""
        assert self._away is None, "a step by layer was not ended"
        super().begin_step(plan)
        if plan is None:
            return False
        self._targets.update({t.ticket: t.target_ids for t in plan.before})
        last = plan.waits_for(LOAD)
        if not by_layer or (LOAD, last) not in plan.promised or len(self._targets[last]) == 1:
            return False
        counts["steps by layer"] += 1
        blocks = torch.tensor(self._targets[last])
        self._away, self._next = (blocks, [row[blocks].clone() for row in self._rows]), 0
        for row in self._rows:
            row[blocks] = 0
        return True

    def wait_group(self, group: int) -> None:
        """Bring this group and those before it."""
        counts["waits for a group"] += 1
        if group != self.deaf_to:
            self._bring(group + 1)

    def wait_all_groups(self) -> None:
        """Bring the rest."""
        self._bring(len(self._row_groups))
        self._away = None

    def _bring(self, end: int) -> None:
        if self._away is None:
            return
        blocks, held = self._away
        for first_row, end_row in self._row_groups[self._next : end]:
            for row in range(first_row, end_row):
                self._rows[row][blocks] = held[row]
        self._next = max(self._next, end)


def install(deaf_to: int = -1) -> None:
    """Make every `CopyEngine` built from now on bring loads by layer, and say how often it did."""
    from kvoffload_patch.transfer.backends import choose

    choose.TorchBackend = GroupsBackend  # type: ignore[misc]
    choose.LOAD_GROUPS, choose.LOAD_GROUP_BYTES = LAYERS, 1
    copy_engine.CopyEngine = LateLayers  # type: ignore[misc]
    LateLayers.deaf_to = deaf_to
    atexit.register(lambda: print("late layers:", counts, file=sys.stderr, flush=True))
