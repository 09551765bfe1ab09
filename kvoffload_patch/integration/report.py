"""One log line per interval, in the form of vLLM's own, on what the tier did."""

from __future__ import annotations

import logging
import time

from kvoffload_patch.tier.manager import OffloadManager

# A child of vLLM's logger: its handlers, format and level are the user's choice already.
logger = logging.getLogger("vllm.kvoffload_patch")


class Report:
    """Says every ``interval`` seconds what happened since the line before, if anything did."""

    def __init__(self, manager: OffloadManager, interval: float) -> None:
        self._manager = manager
        self._interval = interval
        self._next = time.monotonic() + interval
        self._queried = self._hit = 0
        self._last = self._totals()

    def count_hit(self, queried_tokens: int, hit_tokens: int) -> None:
        """A lookup beyond the GPU's cache, and how much of it the tier had."""
        self._queried += queried_tokens
        self._hit += hit_tokens

    def tick(self) -> None:
        """Called every step."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._interval
            self.flush()

    def flush(self) -> None:
        """Write the line for what is not yet reported."""
        totals = self._totals()
        if totals == self._last:
            return
        done = [now - before for now, before in zip(totals, self._last)]
        self._last = totals
        queried, hit, loaded, stored, evicted, dropped, failed = done
        rate = 100.0 * hit / queried if queried else 0.0
        logger.info(
            "KV offload: %d of %d tokens hit (%.1f%%), blocks loaded: %d, stored: %d, "
            "evicted: %d, not stored for want of room: %d%s, tier usage: %.1f%%",
            hit, queried, rate, loaded, stored, evicted, dropped,
            f", failed: {failed}" if failed else "",
            100.0 * self._manager.num_used / max(1, self._manager.num_slots),
        )  # fmt: skip

    def _totals(self) -> tuple[int, ...]:
        stats = self._manager.stats
        return (
            self._queried, self._hit, stats.loaded, stats.stored, stats.evicted, stats.dropped,
            stats.failed,
        )  # fmt: skip
