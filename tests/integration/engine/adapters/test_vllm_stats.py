"""vLLM's own figures: every token of a prompt is counted once, wherever it came from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from integration.engine.mini import BLOCK, Mini

from kvoffload_patch.integration.engine.adapters.vllm_stats import PrefixStats
from kvoffload_patch.integration.engine.requests.lookup import LookupResult

MODES = ["inline", "parked"]


class Figures:
    """What vLLM's front end is told of prompts and hits, from now on."""

    def __init__(self, mini: Mini) -> None:
        self.queried = self.on_gpu = self.beyond = self.external = self.host = 0
        self.local_prompt = self.external_prompt = self.computed = 0
        update = mini.scheduler.update_from_output

        def counted(*args: Any) -> Any:
            outputs = update(*args)
            for one in outputs.values():
                self._take(one)
            return outputs

        mini.scheduler.update_from_output = counted

    def _take(self, outputs: Any) -> None:
        stats = outputs.scheduler_stats
        if stats is not None:
            self.queried += stats.prefix_cache_stats.queries
            self.on_gpu += stats.prefix_cache_stats.hits
            beyond = stats.connector_prefix_cache_stats
            self.external += beyond.hits if beyond is not None else 0
            self.beyond += beyond.queries if beyond is not None else 0
            self.host += sum(getattr(beyond, "hits_by_source", {}).values())
        for one in outputs.outputs:
            prefill = getattr(one, "prefill_stats", None)
            if prefill is not None:
                self.local_prompt += prefill.num_local_cached_tokens
                self.external_prompt += prefill.num_external_cached_tokens
                self.computed += prefill.num_computed_tokens


def prompt(blocks: int, seed: int) -> list[int]:
    return list(range(1000 * seed, 1000 * seed + blocks * BLOCK + 1))


@pytest.mark.parametrize("load_mode", MODES)
def test_hits_on_the_gpu_hits_beyond_it_and_tokens_computed_are_the_prompts(load_mode: str) -> None:
    mini = Mini(load_mode=load_mode)
    mini.only_in_cpu(prompt(3, seed=1), prompt(2, seed=2))
    mini.add(prompt(2, seed=3), count=1)
    mini.run()  # on the GPU, and in the tier
    figures = Figures(mini)
    asked = [prompt(3, seed=1), prompt(2, seed=2), prompt(2, seed=3), prompt(2, seed=4)]
    for each in asked:
        mini.add(each, count=2)
    mini.run()
    mini.check()
    tokens = sum(map(len, asked))
    assert figures.external == figures.host == 5 * BLOCK, "loaded for two of them"
    assert figures.on_gpu == 2 * BLOCK
    assert figures.queried == tokens
    assert figures.external_prompt == figures.external
    assert figures.local_prompt == figures.on_gpu
    assert figures.on_gpu + figures.external + figures.computed == tokens


def test_a_load_that_two_wait_for_is_the_first_ones_hit() -> None:
    mini = Mini(load_mode="parked")
    mini.only_in_cpu(prompt(3, seed=1))
    figures = Figures(mini)
    for _ in range(2):
        mini.add(prompt(3, seed=1), count=1)
    mini.run()
    assert (figures.external, figures.on_gpu) == (3 * BLOCK, 3 * BLOCK)


def test_no_more_is_counted_than_vllm_has_found() -> None:
    mini = Mini()
    request = mini.scheduler.requests[mini.add(prompt(3, seed=1))]
    mini.begin_step()
    counted = mini.view.prefix_stats.count(request, queried=40, hit=30)
    assert counted == (3 * BLOCK + 1, 0)


def test_one_that_was_preempted_counts_by_its_last_lookup_if_it_had_to_wait() -> None:
    mini = Mini()
    request = mini.scheduler.requests[mini.add(prompt(3, seed=1))]
    request.num_preemptions, hits = 1, mini.tier._hits
    for on_gpu in (2 * BLOCK, 0):  # others were given these meanwhile
        found = LookupResult(request.num_tokens)
        found.tokens = found.gpu_tokens = on_gpu
        found.deferred = True
        hits.note(request, found)
    hits.admitted({request.request_id: 1})
    assert (mini.tier.counts().queried, mini.tier.counts().hit) == (request.num_tokens, 0)


@pytest.mark.parametrize("load_mode", MODES)
def test_what_another_of_the_same_step_computes_is_found_on_the_gpu(load_mode: str) -> None:
    mini = Mini(load_mode=load_mode, blocks=60)
    mini.only_in_cpu(prompt(1, seed=1))
    figures, before = Figures(mini), mini.tier.counts()
    for _ in range(3):
        mini.add(prompt(3, seed=1), count=1)
    mini.run()
    mini.check()
    counts = mini.tier.counts()
    queried, hit = counts.queried - before.queried, counts.hit - before.hit
    assert (figures.beyond, figures.external) == (queried, hit)
    assert hit == BLOCK
    assert queried - hit == figures.computed, "what nobody had is computed"


def test_a_connectors_counters_are_left_alone() -> None:
    mini = Mini(tier=False)
    request = mini.scheduler.requests[mini.add(prompt(3, seed=1))]
    request.num_preemptions = 1
    mini.scheduler.connector, mini.scheduler.connector_prefix_cache_stats = object(), "its own"
    from kvoffload_patch.integration.engine.adapters.vllm_stats import PrefixStats

    stats = PrefixStats(mini.scheduler)
    stats.enable()
    assert stats.count(request, queried=40, hit=30) == (40, 30)
    stats.restore()
    assert mini.scheduler.connector_prefix_cache_stats == "its own"


def test_what_one_that_was_preempted_hits_beyond_the_gpu_is_no_hit_of_the_gpus() -> None:
    """Nor of its prompt, which was counted when it was admitted first."""
    mini = Mini()
    request = mini.scheduler.requests[mini.add(prompt(3, seed=1))]
    own, beyond = mini.kv_manager.prefix_cache_stats, mini.scheduler.connector_prefix_cache_stats
    request.num_preemptions, own.preempted_hits, own.hits = 1, 48, 7
    before = vars(request).get("num_external_computed_tokens")
    assert mini.view.prefix_stats.count(request, queried=40, hit=30) == (40, 30)
    assert (own.preempted_hits, own.hits) == (18, 7)
    assert (beyond.preempted_hits, beyond.preempted_queries, beyond.hits) == (30, 40, 0)
    assert vars(request).get("num_external_computed_tokens") == before
    mini.view.prefix_stats.count(request, queried=40, hit=30)
    assert own.preempted_hits == 0, "no figure is below 0"


def test_a_request_that_may_not_hit_is_no_query() -> None:
    mini = Mini()
    figures = Figures(mini)
    mini.add(prompt(3, seed=1), count=1, prompt_logprobs=1)
    mini.run()
    assert figures.queried == figures.beyond == mini.tier.counts().queried == 0


class Scheduler:
    """One that counts every admission itself, as from 0.12 to 0.15."""

    connector = connector_prefix_cache_stats = None
    log_stats = True

    def _update_connector_prefix_cache_stats(self, request: Any) -> None:
        if self.connector_prefix_cache_stats is not None:
            self.connector_prefix_cache_stats.record(request, 0, False)


def test_no_query_is_counted_by_vllm_as_well() -> None:
    scheduler: Any = Scheduler()
    stats = PrefixStats(scheduler)
    stats.enable()
    scheduler._update_connector_prefix_cache_stats(SimpleNamespace(num_tokens=83))
    assert scheduler.connector_prefix_cache_stats.queries == 0
    own = SimpleNamespace(hits=48)
    scheduler.kv_cache_manager = SimpleNamespace(prefix_cache_stats=own)
    about = {"num_tokens": 83, "num_cached_tokens": 48, "num_external_computed_tokens": 0}
    request = SimpleNamespace(**about)
    assert stats.count(request, queried=83, hit=32) == (67, 32)
    assert (own.hits, request.num_external_computed_tokens) == (16, 32)
    stats.restore()
    assert not vars(scheduler).get("_update_connector_prefix_cache_stats")
    assert scheduler.connector_prefix_cache_stats is None, "vLLM reports none of it any more"


def test_nothing_is_counted_where_statistics_are_off_or_know_of_no_other_cache() -> None:
    scheduler: Any = Scheduler()
    scheduler.log_stats = False
    for one in (scheduler, SimpleNamespace(log_stats=True, connector=None)):
        before = dict(vars(one))
        stats = PrefixStats(one)
        stats.enable()
        request = SimpleNamespace(num_tokens=83, num_cached_tokens=48)
        assert stats.count(request, queried=83, hit=32) == (67, 32)
        assert vars(one) == before
