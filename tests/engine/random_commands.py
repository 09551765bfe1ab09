"""What an operator asks of the tier of a random run."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any


class Commands:
    """What an operator asks of a running tier, as its socket hands it on."""

    def __init__(self, stage: Any, seen: Counter[str]) -> None:
        self._stage, self._seen = stage, seen
        self._asked: list[Any] = []
        if stage.tier is not None:
            from kvoffload_patch.integration.engine.control import Desk

            ranks = stage.tier._ranks
            self._desk = Desk(stage.breaker, stage.tier._manager, ranks, {}, lambda: None)
            self._slots, self._slot_bytes = ranks.num_slots, ranks.slot_bytes

    def give(self, rng: random.Random, count: int) -> None:
        """For the next step to carry out; plain vLLM is given none, of the same numbers."""
        kinds = ["pause", *4 * ["resume"], "empty", "resize", "resize", "set", "set"]
        for _ in range(count):
            kind, numbers = rng.choice(kinds), random.Random(rng.random())
            if self._stage.tier is not None:
                self._give(kind, numbers)

    def restore(self) -> None:
        """Let the tier have all of its room again, and store."""
        if self._stage.tier is not None:
            self._resize(self._slots)
            self._ask("resume")

    def _give(self, kind: str, rng: random.Random) -> None:
        from kvoffload_patch.config import EVICTIONS, GPU_PREFIXES, LOAD_MODES

        if kind == "resize":
            self._resize(rng.randint(1, self._slots))
        elif kind == "set":
            eviction, load_mode = rng.choice(EVICTIONS), rng.choice(LOAD_MODES)
            prefixes, stall_ms = rng.choice(GPU_PREFIXES), rng.choice([0.0, 1.0, 500.0])
            more = {"gpu_prefixes": prefixes, "max_stall_ms": stall_ms}
            self._ask(kind, eviction=eviction, load_mode=load_mode, **more)
        else:
            self._ask(kind)
        self._seen[kind] += 1

    def _resize(self, slots: int) -> None:
        self._ask("resize", gib=slots * self._slot_bytes / (1 << 30))

    def _ask(self, kind: str, **values: Any) -> None:
        from kvoffload_patch.control.commands import Command
        from kvoffload_patch.integration.engine.control import Asked

        self._asked.append(Asked(Command(kind, values)))
        self._stage.breaker.asked.append(self._asked[-1])

    def refused(self) -> list[str]:
        """Commands that were not carried out; loads that are checked first cannot be inline."""
        return [
            f"a command: {one.error or 'never answered'}"
            for one in self._asked
            if not one.done.is_set()
            or (one.error and "loads that can be checked" not in str(one.error))
        ]
