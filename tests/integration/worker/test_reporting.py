"""Which rank's result the engine gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload_patch.integration.worker.reporting import ranks_of_engine, reports


@pytest.mark.parametrize(
    ("parallel", "ranks", "reporting"),
    [
        ({"tensor_parallel_size": 2}, 2, 0),
        ({"pipeline_parallel_size": 2}, 2, 1),
        ({"tensor_parallel_size": 4, "pipeline_parallel_size": 2}, 8, 4),
        ({"tensor_parallel_size": 2, "prefill_context_parallel_size": 2}, 4, 0),
    ],
)
def test_one_rank_reports_of_the_last_stage(
    parallel: dict[str, Any], ranks: int, reporting: int
) -> None:
    config = SimpleNamespace(parallel_config=SimpleNamespace(**parallel))
    workers = [SimpleNamespace(vllm_config=config, rank=rank) for rank in range(ranks)]
    assert [ranks_of_engine(worker) for worker in workers] == [ranks] * ranks
    assert [worker.rank for worker in workers if reports(worker)] == [reporting]


def test_the_only_rank_of_an_engine_reports_whatever_its_number() -> None:
    """With data parallel engines that a launcher of the user's starts, ranks count over all."""
    parallel = SimpleNamespace(tensor_parallel_size=1, world_size=2)
    assert reports(SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel), rank=1))
