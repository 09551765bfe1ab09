"""Loads that arrive layer by layer, each as late as the gate allows, on the CPU device.

The CPU device copies at once and in one piece. This engine takes a load's bytes out of the GPU
blocks again, and puts a group of them back when a step waits for that group or a later one. A
layer that computes without waiting for its KV finds zeros there, which shows as a wrong token.
"""

from __future__ import annotations

import atexit
import sys
from typing import Any

import torch
from model import LAYERS

from kvoffload_patch.links import LOAD
from kvoffload_patch.transfer import engine as copy_engine
from kvoffload_patch.transfer.backends import choose as backends

counts = {"steps by layer": 0, "waits for a group": 0}


class LateLayers(copy_engine.CopyEngine):
    """Stands in for `CopyEngine`."""

    deaf_to = -1  # a group whose waits do nothing: what a missing wait would do

    def __init__(self, layout: Any, backend: Any, *args: Any) -> None:
        super().__init__(layout, backend, *args)
        self._rows, self._groups = layout.rows, backend.groups
        self._away: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        self._next = 0

    def begin_step(self, plan: Any, by_layer: bool = False) -> None:
        """Carry out the plan, and take away what it loads."""
        assert not self._away, "a step by layer was not ended"
        super().begin_step(plan, by_layer)
        if not by_layer:
            return
        counts["steps by layer"] += 1
        self._next = 0
        for load in plan.before:
            if load.ticket > plan.waits_for(LOAD):
                continue
            blocks = torch.tensor(load.target_ids)
            self._away.append((blocks, [row[blocks].clone() for row in self._rows]))
            for row in self._rows:
                row[blocks] = 0

    def wait_group(self, group: int) -> None:
        """Bring this group and those before it."""
        counts["waits for a group"] += 1
        if group != self.deaf_to:
            self._bring(group + 1)

    def wait_all_loads(self) -> None:
        """Bring the rest."""
        self._bring(len(self._groups))
        self._away.clear()
        super().wait_all_loads()

    def _bring(self, end: int) -> None:
        for first_row, end_row in self._groups[self._next : end]:
            for blocks, held in self._away:
                for row in range(first_row, end_row):
                    self._rows[row][blocks] = held[row]
        self._next = max(self._next, end)


def install(deaf_to: int = -1) -> None:
    """Make every `CopyEngine` built from now on bring loads by layer, and say how often it did."""
    as_made = backends.choose_backend

    def choose_in_groups(layout: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = as_made(layout, *args, **kwargs)
        chosen.backend.groups = layout.cut(LAYERS, 1)
        return chosen

    backends.choose_backend = choose_in_groups
    copy_engine.CopyEngine = LateLayers
    LateLayers.deaf_to = deaf_to
    atexit.register(lambda: print("late layers:", counts, file=sys.stderr, flush=True))
