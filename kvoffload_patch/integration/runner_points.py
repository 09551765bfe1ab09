"""Rows of the table for the workers: model runners V1 and V2."""

from __future__ import annotations

from kvoffload_patch.integration.table import Shape, row

_V1 = "vllm.v1.worker.gpu_model_runner"
_V2 = "vllm.v1.worker.gpu.model_runner"
_STEP = ("self", "scheduler_output", "intermediate_tensors")
_V1_OUTPUT = "ModelRunnerOutput | AsyncModelRunnerOutput | IntermediateTensors"
_LOAD_WHY = "CPU memory is taken beside it, which takes as long"
_STEP_WHY = "loads go before the forward pass and stores after it, on every rank"
_END_WHY = "a step ends here, and its output carries the result back"

RUNNERS = (
    *row(
        "worker",
        "runner_v1.load_model",
        (_V1, "GPUModelRunner.load_model"),
        "worker_hooks:load_model",
        _LOAD_WHY,
        Shape(">=0", ("self",), "None"),
    ),
    *row(
        "worker",
        "runner_v1.execute_model",
        (_V1, "GPUModelRunner.execute_model"),
        "worker_hooks:execute_model",
        _STEP_WHY,
        Shape("<0.10.2", _STEP, "Union[ModelRunnerOutput, IntermediateTensors]"),
        Shape(
            ">=0.10.2,<0.11.1",
            _STEP,
            "Union[ModelRunnerOutput, AsyncModelRunnerOutput, IntermediateTensors]",
        ),
        Shape(">=0.11.1,<0.14", _STEP, "ModelRunnerOutput | IntermediateTensors | None"),
        Shape(">=0.14", _STEP, f"{_V1_OUTPUT} | None"),
    ),
    *row(
        "worker",
        "runner_v1.sample_tokens",
        (_V1, "GPUModelRunner.sample_tokens"),
        "worker_hooks:sample_tokens",
        _END_WHY,
        Shape("<0.11.1", None),  # execute_model samples
        Shape(">=0.11.1", ("self", "grammar_output"), _V1_OUTPUT),
    ),
    *row(
        "worker",
        "runner_v2.load_model",
        (_V2, "GPUModelRunner.load_model"),
        "worker_hooks:load_model",
        _LOAD_WHY,
        Shape("<0.12", None),
        Shape(">=0.12", ("self",), "None"),
    ),
    *row(
        "worker",
        "runner_v2.execute_model",
        (_V2, "GPUModelRunner.execute_model"),
        "worker_hooks:execute_model",
        _STEP_WHY,
        Shape("<0.12", None),
        Shape(">=0.12,<0.17", (*_STEP, "dummy_run"), "ModelRunnerOutput | None"),
        Shape(">=0.17", (*_STEP, "dummy_run"), "ModelRunnerOutput | IntermediateTensors | None"),
    ),
    *row(
        "worker",
        "runner_v2.sample_tokens",
        (_V2, "GPUModelRunner.sample_tokens"),
        "worker_hooks:sample_tokens",
        _END_WHY,
        Shape("<0.12", None),
        Shape(">=0.12,<0.17", ("self", "grammar_output"), "AsyncOutput | ModelRunnerOutput"),
        Shape(">=0.17", ("self", "grammar_output"), "AsyncOutput | ModelRunnerOutput | None"),
    ),
    *row(
        "worker",
        "runner_v2.pool",
        (_V2, "GPUModelRunner.pool"),
        "worker_hooks:sample_tokens",
        "a pooling model's step ends here instead",
        Shape("<0.17", None),
        Shape(">=0.17", ("self",), "AsyncPoolingOutput | ModelRunnerOutput | None"),
    ),
)
