"""The tier over a pool whose blocks lose their memory, with what stands in for kvcached's.

`tests/scheduler_half/test_elastic.py` plays the same on kvcached's own code.
"""

from __future__ import annotations

import pytest

pytest.importorskip("vllm.v1.core.block_pool")

from scheduler_half.elastic_mini import SCENARIOS, ElasticMini  # noqa: E402

from kvoffload_patch.integration.engine.elastic_tier import ElasticTier  # noqa: E402
from kvoffload_patch.integration.install import older_than  # noqa: E402

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
