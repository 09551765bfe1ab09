"""Records of which experts computed a token, over a stand-in for vLLM's.

`scheduler_half.scenarios` plays vLLM's own, in releases that have one.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from integration.engine.mini import BLOCK, Mini

from kvoffload_patch.integration.engine.adapters.vllm_experts import experts_of, limits_hits


class Kept:
    """As `AuxOutputSchedulerConnector` of 0.33, for prefixes of so many blocks."""

    def __init__(self, blocks: int) -> None:
        self._capacity = 24
        self.blocks = blocks
        self.loading: dict[str, int] = {}

    def max_cache_hit(self, request: Any) -> int:
        return min(self.blocks * BLOCK, request.num_tokens - 1)

    def request_loading(self, request: Any, num_tokens: int) -> None:
        self.loading[request.request_id] = num_tokens

    def build_connector_meta(self, output: Any, requests: Any) -> None:
        """Nothing goes to a worker."""

    def request_finished(self, request: Any) -> None:
        """Nothing is kept."""

    def take_output(self, request: Any, output: Any) -> None:
        """No answer says anything."""


class KeptMini(Mini):
    """A `Mini` whose scheduler has them."""

    def _make_scheduler(self, *args: Any, **more: Any) -> None:
        super()._make_scheduler(*args, **more)
        self.kept = self.scheduler.aux_output_connector = Kept(blocks=3)


def test_a_scheduler_without_records_has_none() -> None:
    assert experts_of(SimpleNamespace()) is None
    assert experts_of(SimpleNamespace(aux_output_connector=None)) is None
    assert not limits_hits(SimpleNamespace(aux_output_connector=SimpleNamespace()))
    assert limits_hits(SimpleNamespace(aux_output_connector=Kept(1)))


def test_records_of_the_tiers_blocks_are_kept_until_it_is_detached() -> None:
    mini = KeptMini(num_slots=100)
    assert mini.kept._capacity == 124
    mini.breaker.withdraw()
    assert mini.kept._capacity == 24


def test_a_hit_ends_where_there_are_no_records() -> None:
    prompt = list(range(3, 3 + 6 * BLOCK))
    mini = KeptMini(load_mode="inline")
    mini.only_in_cpu(prompt)
    asked = mini.add([*prompt, 5])
    mini.run()
    mini.check()
    assert mini.hits[asked] == 3 * BLOCK and not mini.kept.loading
    mini = KeptMini(load_mode="parked", late=1)
    mini.only_in_cpu(prompt)
    asked = mini.add([*prompt, 5])
    mini.run()
    mini.check()
    assert mini.hits[asked] == 3 * BLOCK
    assert mini.kept.loading == {asked: 3 * BLOCK}, "its records stay while it waits"


def test_nobody_hits_what_an_aborted_request_loads() -> None:
    prompt = list(range(3, 3 + 6 * BLOCK))
    mini = KeptMini(load_mode="parked", late=20)
    mini.only_in_cpu(prompt)
    mini.add([9] * 5, count=60)
    mini.step()
    first = mini.add([*prompt, 5])
    mini.step()
    mini.abort(first)
    assert mini.tier._loads.under_way
    while mini.tier._loads.under_way:
        mini.step()
    again = mini.add([*prompt, 7])
    key = mini.view.key(mini.scheduler.requests[again].block_hashes[0], 0)
    assert mini.view.gpu_lookup()(key) is None
    mini.run()
    mini.check()
