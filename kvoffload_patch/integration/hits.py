"""Counting, once for each request, what the tier had for it when it was admitted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvoffload_patch.integration.adapters import SchedulerView
from kvoffload_patch.integration.probe import Found
from kvoffload_patch.integration.report import Report


class _LookedUp(NamedTuple):
    """A request looked up and not admitted yet: tokens that the GPU lacked, and the tier had."""

    request: Any
    queried: int
    hit: int
    used: bool


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
        view.enable_hit_counts()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._looked_up

    def __len__(self) -> int:
        return len(self._looked_up)

    def found(self, request: Any, found: Found, used: bool) -> None:
        """A request was looked up, and what was found is used now, or not yet."""
        before = self._looked_up.get(request.request_id)
        if before is None or (used and not before.used):
            beyond_gpu = request.num_tokens - found.gpu_tokens
            hit = found.tokens - found.gpu_tokens if used else 0
            self._looked_up[request.request_id] = _LookedUp(request, beyond_gpu, hit, used)

    def admitted(self, scheduled: Mapping[str, int]) -> list[str]:
        """These requests were scheduled; returns those that were counted for that."""
        fewer, more = sorted((self._looked_up, scheduled), key=len)
        counted = [request_id for request_id in fewer if request_id in more]
        for request_id in counted:
            request, queried, hit, _ = self._looked_up.pop(request_id)
            self._view.count_hit(request, queried, hit)
            self._report.count_hit(queried, hit)
        return counted

    def forget(self, request_id: str) -> None:
        """The request is gone."""
        self._looked_up.pop(request_id, None)

    def clear(self) -> None:
        """Every request is gone, or what the tier had for it is."""
        self._looked_up.clear()
