"""vLLM's own figures of prefix caching, in which the tier is the cache beyond the GPU's.

What a request finds in the tier is loaded into the GPU's prefix cache, where vLLM finds it when it
admits the request, and counts it as a hit of its own. Where the release knows of another cache, it
is counted there instead: hits on the GPU, hits beyond it and tokens computed are the prompt.
"""

from __future__ import annotations

from typing import Any

_COUNTS = "_update_connector_prefix_cache_stats"


class PrefixStats:
    """The counters of one scheduler. They are left alone where a connector has them.

    Up to 0.11.0 vLLM has no counter for a cache beyond the GPU's: there, hits stay hits of its own.

    Args:
        scheduler: a `vllm.v1.core.sched.scheduler.Scheduler`, constructed.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._counting = False
        self._host: Any = None

    def enable(self) -> None:
        """Have vLLM report hits in the tier, from zero, if its statistics are on."""
        from vllm.v1.metrics.stats import PrefixCacheStats

        scheduler = self._scheduler
        if not hasattr(scheduler, "connector_prefix_cache_stats"):
            return
        if scheduler.log_stats and scheduler.connector is None:
            scheduler.connector_prefix_cache_stats = stats = PrefixCacheStats()
            self._counting = True
            # From 0.12 to 0.15 vLLM counts each admission there, with or without a connector.
            if hasattr(type(scheduler), _COUNTS):
                setattr(scheduler, _COUNTS, _count_nothing)
            if hasattr(stats, "hits_by_source"):  # from 0.32 on
                from vllm.v1.metrics.cache_hit_source import CacheHitSource

                self._host = CacheHitSource.HOST

    def count(self, request: Any, queried: int, hit: int) -> tuple[int, int]:
        """A request was admitted by the `schedule` that has just returned.

        Args:
            request: the request.
            queried: tokens that it lacked on the GPU when it was looked up.
            hit: of these, the tokens that the tier had.

        Returns:
            Both, as they count: by what vLLM has found when it admitted the request. Others of the
            same step may have computed more of its prefix since, or taken some of what it hits.
        """
        preempted = getattr(request, "num_preemptions", 0) > 0
        found = None if preempted else _found_by_vllm(request)  # said of the first time only
        if found is not None:
            hit = min(hit, found)
            queried = queried and int(request.num_tokens) - (found - hit)
        external = getattr(self._scheduler, "connector_prefix_cache_stats", None)
        if external is None or not self._counting or queried <= 0:
            return queried, hit
        external.record(num_tokens=queried, num_hits=hit, preempted=preempted)
        own = self._scheduler.kv_cache_manager.prefix_cache_stats
        if preempted:
            own.preempted_hits = max(0, own.preempted_hits - hit)
        elif hit:
            own.hits = max(0, own.hits - hit)
            self._move(request, hit, external)
        return queried, hit

    def restore(self) -> None:
        """Leave vLLM's counters to vLLM."""
        if self._counting:
            self._counting = False
            self._scheduler.connector_prefix_cache_stats = None
            self._scheduler.__dict__.pop(_COUNTS, None)

    def _move(self, request: Any, hit: int, external: Any) -> None:
        """The request's own figures say so as well."""
        if self._host is not None:
            external.hits_by_source[self._host] = external.hits_by_source.get(self._host, 0) + hit
        prefill = getattr(request, "prefill_stats", None)
        if prefill is not None:
            prefill.num_local_cached_tokens -= hit
            prefill.num_external_cached_tokens += hit
        elif hasattr(request, "num_external_computed_tokens"):  # 0.12 to 0.19
            request.num_external_computed_tokens = hit


def _count_nothing(*_: Any) -> None:
    """In the place of vLLM's own count."""


def _found_by_vllm(request: Any) -> int | None:
    """Tokens of its prefix that vLLM has found on the GPU when it admitted a request.

    None where that is not known: from 0.25 on, of a request's second turn.
    """
    prefill = getattr(request, "prefill_stats", None)
    if prefill is not None:
        return int(prefill.num_local_cached_tokens)
    found: int | None = getattr(request, "num_cached_tokens", None)
    return found
