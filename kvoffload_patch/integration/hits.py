"""What becomes of hits: counted once for each request, and kept recent in the tier."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from kvoffload_patch.integration.adapters import SchedulerView
from kvoffload_patch.integration.probe import Found
from kvoffload_patch.integration.report import Report
from kvoffload_patch.tier.manager import OffloadManager


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


class UsedHits:
    """Keeps what requests hit on the GPU recent in the tier, and stores what it has lost since.

    One step later: the step that a request joins is the longest on the host as it is.

    Args:
        view: the scheduler.
        manager: of the tier.
    """

    def __init__(self, view: SchedulerView, manager: OffloadManager) -> None:
        self._view = view
        self._manager = manager
        self._used: list[list[tuple[int, Hashable]]] = []

    def note(self, blocks: Sequence[Any]) -> None:
        """A request hits these GPU blocks, in prefix order; loads under way may fill some."""
        if blocks:
            keyed = [(b.block_id, b.block_hash) for b in blocks if b.block_hash is not None]
            self._used.append(keyed)

    def refresh(self) -> None:
        """Take in what was noted since."""
        for prefix in self._used:
            self._manager.touch([key for _, key in prefix])
            for gpu_block_id, key in prefix:
                # What has left the GPU cache meanwhile may have made room for another's store.
                if self._view.still_cached(gpu_block_id, key):
                    self._manager.queue_store(key, gpu_block_id)
        self._used.clear()

    def clear(self) -> None:
        """Forget what was noted."""
        self._used.clear()
