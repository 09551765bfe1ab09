"""The tier over a pool whose blocks lose their memory, with what stands in for kvcached's.

`tests/scheduler_half/test_elastic.py` plays the same on kvcached's own code.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.block_pool")

from scheduler_half.elastic_mini import SCENARIOS, ElasticMini, question

from kvoffload_patch.integration.engine.elastic_tier import ElasticTier
from kvoffload_patch.integration.install import older_than

pytestmark = pytest.mark.skipif(
    older_than("0.26"),
    reason="the tier refuses kvcached's pool before vLLM 0.26, because its keys are not vLLM's own",
)


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_copy_outlives_the_memory_of_its_blocks(name: str) -> None:
    SCENARIOS[name](ElasticMini)


def test_a_tier_over_vllms_own_pool_has_none_of_it() -> None:
    from integration.engine.mini import Mini

    assert not isinstance(Mini().tier, ElasticTier)
    assert isinstance(ElasticMini().tier, ElasticTier)


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_plan_that_was_made_is_carried_out_whatever_fails_after_that(nth: int) -> None:
    """Its loads are promised: the blocks that they fill are in vLLM's prefix cache already."""
    mini = ElasticMini(load_mode="inline", blocks=49)
    asked = question(6, 1)
    mini.only_in_cpu(asked)
    refs, calls = mini.tier._refs, list[Any]()

    def keep(transfers: Any, as_made: Any = refs.keep) -> None:
        calls.append(tuple(transfers))
        if len(calls) == nth:
            raise RuntimeError("as the test has it")
        as_made(transfers)

    refs.keep = keep
    mini.add(asked + question(2, 2), count=3)
    mini.run()
    assert calls[0] and len(calls) == nth and mini.breaker.detached
    mini.check()
    assert not [b.block_id for b in mini.pool.blocks if b.ref_cnt and not b.is_null]
