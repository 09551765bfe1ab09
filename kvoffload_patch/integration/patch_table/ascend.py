"""The rows of vllm-ascend, the package that runs vLLM on Ascend NPUs, for releases of its own.

Its model runner V1 derives from vLLM's and overrides the functions that are hooked there; its V2
inherits them. What is recorded of its releases is their source as released: no release of it has
run with this package.
"""

from __future__ import annotations

from pathlib import Path

from kvoffload_patch.integration.patch_table.points import VLLM
from kvoffload_patch.integration.patch_table.shape import Shape, row
from kvoffload_patch.patching import Host, Records

DATA = Path(__file__).parent / "digests" / "vllm_ascend.json"
RECORDS = Records.load(DATA)
RELEASES = RECORDS.releases

VLLM_ASCEND = Host(
    name="vllm-ascend",
    distributions=("vllm-ascend",),
    package="vllm_ascend",
    supported=f">={RELEASES[0]},<0.{int(RELEASES[-1].split('.')[1]) + 2}",
    remedy=VLLM.remedy,
    records=RECORDS,
    override=VLLM.override,
)

_RUNNER = "vllm_ascend.worker.model_runner_v1"
_DECORATED = ("torch", "vllm", "vllm_ascend")

POINTS = (
    *row(
        "ascend_runner.load_model",
        (_RUNNER, "NPUModelRunner.load_model"),
        "worker.hooks:load_model",
        "it overrides vLLM's; CPU memory is taken beside it, which takes as long",
        Shape(">=0", ("self",), "None"),
        wrappers=_DECORATED,
    ),
    *row(
        "ascend_runner.execute_model",
        (_RUNNER, "NPUModelRunner.execute_model"),
        "worker.hooks:execute_model",
        "it overrides vLLM's; loads go before the forward pass and stores after it, on every rank",
        Shape(
            "<0.15",
            ("self", "scheduler_output", "intermediate_tensors"),
            "Union[ModelRunnerOutput, IntermediateTensors] | None",
        ),
        Shape(
            ">=0.15",
            ("self", "scheduler_output", "intermediate_tensors"),
            "ModelRunnerOutput | IntermediateTensors | None",
        ),
        wrappers=_DECORATED,
    ),
    *row(
        "ascend_runner.sample_tokens",
        (_RUNNER, "NPUModelRunner.sample_tokens"),
        "worker.hooks:sample_tokens",
        "it overrides vLLM's; a step ends here, and its output carries the result back",
        Shape(
            ">=0",
            ("self", "grammar_output"),
            "ModelRunnerOutput | AsyncModelRunnerOutput | IntermediateTensors",
        ),
        wrappers=_DECORATED,
    ),
)
