"""Hits, counted once for each request, and the line in the log on what the tier did."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvoffload_patch.integration.engine.adapters.vllm_scheduler import SchedulerView
from kvoffload_patch.integration.engine.reports.spans import spans_of
from kvoffload_patch.integration.engine.requests.lookup import LookupResult
from kvoffload_patch.tier.manager import OffloadManager

# A child of vLLM's logger: its handlers, format and level are the user's choice already.
logger = logging.getLogger("vllm.kvoffload_patch")


class Report:
    """Says every ``interval`` seconds what happened since the line before, if anything did.

    Attributes:
        queried, hit, spared: tokens of admitted requests that the GPU lacked, those that the tier
            had and loads, and those that it had and that are computed, since start.
        last_step: when a step was last scheduled; before the first one, when this was made.
    """

    def __init__(self, manager: OffloadManager, interval: float) -> None:
        self._manager = manager
        self.last_step = time.monotonic()
        self.use(interval)
        self.queried = self.hit = self.spared = 0
        self._last = self._totals()

    def use(self, interval: float) -> None:
        """Write a line every so many seconds, counted from now."""
        self._interval = interval
        self._next = time.monotonic() + interval

    def count_hit(self, queried_tokens: int, hit_tokens: int, spared_tokens: int) -> None:
        """A lookup beyond the GPU's cache, and what the tier had: loaded, and computed again."""
        self.queried += queried_tokens
        self.hit += hit_tokens
        self.spared += spared_tokens

    def tick(self) -> None:
        """Called every step."""
        self.last_step = now = time.monotonic()
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
        queried, hit, spared, loaded, stored, evicted, dropped, failed = done
        rate = 100.0 * hit / queried if queried else 0.0
        logger.info(
            "KV offload: %d of %d tokens hit (%.1f%%)%s, blocks loaded: %d, stored: %d, "
            "evicted: %d, not stored for want of room: %d%s, tier usage: %.1f%%",
            hit, queried, rate,
            f", {spared} in the tier but computed, as loads are slow" if spared else "",
            loaded, stored, evicted, dropped,
            f", failed: {failed}" if failed else "",
            100.0 * self._manager.num_used / max(1, self._manager.num_slots),
        )  # fmt: skip

    def _totals(self) -> tuple[int, ...]:
        stats = self._manager.stats
        return (
            self.queried, self.hit, self.spared, stats.loaded, stats.stored, stats.evicted,
            stats.dropped, stats.failed,
        )  # fmt: skip


class _LookedUp(NamedTuple):
    """A request looked up and not admitted yet: tokens that the GPU lacked, and the tier had.

    What it had besides and is computed is `spared`. `since` is when it was looked up first, for
    spans; 0 where there are none.
    """

    request: Any
    queried: int
    hit: int
    spared: int
    used: bool
    since: int


class HitCounts:
    """Remembers what lookups found until their requests are admitted, and counts it then.

    Args:
        view: the scheduler, whose statistics say it to users.
        report: the log line, which says it too.
    """

    def __init__(self, view: SchedulerView, report: Report) -> None:
        self._view = view
        self._report = report
        self._looked_up: dict[str, _LookedUp] = {}
        self._spans = spans_of(view.scheduler)
        view.prefix_stats.enable()

    def note(self, request: Any, found: LookupResult) -> None:
        """A request was looked up, and what was found is used now, or not yet if deferred."""
        used = not found.deferred
        before = self._looked_up.get(request.request_id)
        if before is None or not before.used:
            beyond_gpu = request.num_tokens - found.gpu_tokens
            beyond_gpu *= self._view.may_hit(request)
            hit = found.tokens - found.gpu_tokens if used else 0
            since = before.since if before else self._spans.now() if self._spans else 0
            noted = _LookedUp(request, beyond_gpu, hit, found.spared, used, since)
            self._looked_up[request.request_id] = noted

    def admitted(self, scheduled: Mapping[str, int]) -> list[str]:
        """These requests were scheduled; returns those that were counted for that."""
        if not self._looked_up:
            return []
        fewer, more = sorted((self._looked_up, scheduled), key=len)
        counted = [request_id for request_id in fewer if request_id in more]
        for request_id in counted:
            request, queried, hit, spared, _, since = self._looked_up.pop(request_id)
            queried, hit = self._view.prefix_stats.count(request, queried, hit)
            self._report.count_hit(queried, hit, spared)
            if self._spans is not None:
                self._spans.admitted(request, since, queried, hit)
        return counted

    def forget(self, request_id: str) -> None:
        """The request is gone."""
        self._looked_up.pop(request_id, None)

    def clear(self) -> None:
        """Every request is gone, or what the tier had for it is."""
        self._looked_up.clear()
