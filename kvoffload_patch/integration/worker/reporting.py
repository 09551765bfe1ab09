"""Which rank of an engine reports to it."""

from __future__ import annotations

from typing import Any


def ranks_of_stage(worker: Any) -> int:
    """Ranks in one pipeline stage of an engine."""
    parallel = worker.vllm_config.parallel_config
    in_stage = getattr(parallel, "tensor_parallel_size", 1)
    return int(in_stage * getattr(parallel, "prefill_context_parallel_size", 1))


def ranks_of_engine(worker: Any) -> int:
    """Ranks that carry out one step together, of one scheduler or of one each."""
    stages = getattr(worker.vllm_config.parallel_config, "pipeline_parallel_size", 1)
    return ranks_of_stage(worker) * int(stages)


def reports(worker: Any) -> bool:
    """Whether the engine gets this rank's result: of the last stage's ranks, the first one's.

    As vLLM has it in `MultiprocExecutor._get_output_rank`. Of an executor that takes another one's,
    what fails on that rank ends the engine.
    """
    ranks = ranks_of_engine(worker)
    return bool(ranks == 1 or worker.rank == ranks - ranks_of_stage(worker))
