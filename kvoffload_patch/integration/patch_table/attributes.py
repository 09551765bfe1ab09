"""What the tier reads and sets of vLLM's objects, besides the functions of the other tables.

A name is listed with exactly the releases that have it: in the others, adapters ask for it and
must not find it, because nobody has looked at what it would mean there.
"""

from __future__ import annotations

from kvoffload_patch.patching import Attributes

_ANY = ">=0"


def _has(module: str, owner: str, *eras: tuple[str, str]) -> tuple[Attributes, ...]:
    """Rows of one class; each era is (releases, names)."""
    return tuple(
        Attributes(module, owner, tuple(names.split()), versions) for versions, names in eras
    )


_SCHEDULER = (
    *_has(
        "vllm.v1.core.sched.scheduler",
        "Scheduler",
        (
            _ANY,
            "running waiting requests max_num_running_reqs max_num_scheduled_tokens "
            "num_lookahead_tokens num_spec_tokens finished_recving_kv_req_ids kv_cache_manager "
            "vllm_config "
            "kv_cache_config scheduler_config connector log_stats schedule",
        ),
        (">=0.11.1", "connector_prefix_cache_stats ec_connector"),
        (">=0.11.1,<0.16", "_update_connector_prefix_cache_stats"),
        (">=0.12", "use_v2_model_runner"),
        (">=0.15", "num_waiting_for_streaming_input"),
        (">=0.17", "pause_state"),
        (">=0.18,<0.31", "skipped_waiting"),
        (">=0.19", "scheduler_reserve_full_isl"),
        (
            ">=0.31",
            "aux_output_connector kv_holding_waiting max_num_active_reqs "
            "adaptive_long_prefill_threshold prefix_replay_tokens",
        ),
    ),
    *_has("vllm.v1.core.sched.scheduler", "", (_ANY, "Scheduler")),
    *_has(
        "vllm.distributed.aux_output_connector.connector",
        "AuxOutputSchedulerConnector",
        (">=0.33", "_capacity max_cache_hit"),
    ),
    *_has("vllm.v1.core.sched.interface", "PauseState", (">=0.17", "UNPAUSED")),
    *_has("vllm.v1.core.sched.request_queue", "PriorityRequestQueue", (">=0.9.2", "_heap")),
    *_has(
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        (
            _ANY,
            "num_scheduled_tokens total_num_scheduled_tokens scheduled_new_reqs "
            "scheduled_cached_reqs finished_req_ids num_common_prefix_blocks",
        ),
        (">=0.17.1", "new_block_ids_to_zero"),
        (">=0.26", "kv_cache_block_copies"),
    ),
    *_has(
        "vllm.v1.core.sched.output",
        "NewRequestData",
        (_ANY, "req_id num_computed_tokens"),
        (">=0.9.2", "pooling_params"),
        ("<0.10.1", "mm_inputs"),
        (">=0.10.1,<0.11", "mm_kwargs"),
        (">=0.11", "mm_features prompt_embeds"),
    ),
    *_has(
        "vllm.v1.core.sched.output",
        "CachedRequestData",
        ("<0.9.2", "req_id"),
        (">=0.9.2", "req_ids"),
        ("<0.14", "resumed_from_preemption"),
        (">=0.11.1", "resumed_req_ids"),
    ),
    *_has("vllm.v1.metrics.stats", "", (_ANY, "PrefixCacheStats SchedulerStats")),
    *_has(
        "vllm.v1.metrics.stats",
        "PrefixCacheStats",
        (_ANY, "hits"),
        (">=0.11.1", "preempted_hits"),
        (">=0.32", "hits_by_source"),
    ),
    *_has(
        "vllm.v1.metrics.stats",
        "PrefillStats",
        (">=0.20", "num_local_cached_tokens num_external_cached_tokens"),
    ),
    *_has(
        "vllm.v1.engine.core",
        "EngineCore",
        (_ANY, "vllm_config scheduler model_executor batch_queue"),
    ),
    *_has("vllm.v1.engine.core", "EngineCoreProc", (_ANY, "input_queue output_queue")),
    *_has("vllm.v1.engine", "EngineCoreRequestType", (_ANY, "ABORT")),
    *_has("vllm.v1.engine", "EngineCoreOutputs", (_ANY, "engine_index scheduler_stats")),
)

_REQUEST = (
    *_has(
        "vllm.lora.request",
        "LoRARequest",
        (_ANY, "lora_name lora_path lora_int_id"),
        (">=0.15", "load_inplace"),
    ),
    *_has(
        "vllm.v1.request",
        "Request",
        (
            _ANY,
            "request_id status num_tokens num_computed_tokens num_tokens_with_spec "
            "structured_output_request sampling_params num_prompt_tokens lora_request",
        ),
        (">=0.10", "num_output_placeholders"),
        (">=0.10.1", "block_hashes"),
        ("<0.20", "num_cached_tokens"),
        (">=0.11.1", "num_preemptions skip_reading_prefix_cache"),
        (">=0.12,<0.20", "num_external_computed_tokens"),
        (">=0.20", "prefill_stats"),
        (">=0.10.2", "trace_headers"),
        (">=0.26", "num_in_flight_tokens"),
        (">=0.27", "drop_stale_output num_stale_output_tokens"),
        (">=0.15", "resumable"),
        (">=0.31", "replay_start"),
    ),
    *_has("vllm.sampling_params", "SamplingParams", (_ANY, "extra_args prompt_logprobs")),
    *_has(
        "vllm.v1.request",
        "RequestStatus",
        (_ANY, "WAITING RUNNING PREEMPTED WAITING_FOR_REMOTE_KVS"),
        ("<0.19", "WAITING_FOR_FSM"),
        (">=0.19", "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"),
    ),
    *_has("vllm.v1.structured_output.request", "StructuredOutputRequest", (_ANY, "grammar")),
)

_CACHE = (
    *_has(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager",
        (_ANY, "block_pool coordinator log_stats prefix_cache_stats"),
        (">=0.24", "watermark_blocks"),
        (">=0.26", "enable_kv_cache_events"),
    ),
    *_has("vllm.v1.core.kv_cache_manager", "KVCacheBlocks", (_ANY, "blocks")),
    *_has(
        "vllm.v1.core.kv_cache_coordinator",
        "HybridKVCacheCoordinator",
        (_ANY, "block_pool single_type_managers"),
        (">=0.26", "enable_partial_hash_hits"),
    ),
    *_has(
        "vllm.v1.core.kv_cache_coordinator",
        "UnitaryKVCacheCoordinator",
        (_ANY, "block_pool single_type_managers"),
        ("<0.20", "use_eagle"),
        (">=0.20", "eagle_group_ids"),
        (">=0.28", "enable_partial_hash_hits"),
    ),
    *_has(
        "vllm.v1.core.single_type_kv_cache_manager",
        "SingleTypeKVCacheManager",
        (_ANY, "block_pool block_size kv_cache_spec"),
        (">=0.20,<0.31", "_max_admission_blocks_per_request"),
        (">=0.31", "max_admission_blocks_per_request"),
        (">=0.23", "use_eagle"),
    ),
    *_has(
        "vllm.v1.core.block_pool",
        "BlockPool",
        (
            _ANY,
            "blocks cached_block_hash_to_block enable_kv_cache_events free_block_queue "
            "kv_event_queue",
        ),
        (">=0.12", "hash_block_size metrics_collector"),
        (">=0.24", "cached_block_hashes_by_block"),
    ),
    *_has("vllm.v1.core.block_pool", "BlockHashToBlockMap", (">=0.11", "_cache")),
    *_has("vllm.distributed.kv_events", "", (_ANY, "BlockStored BlockRemoved")),
    *_has(
        "vllm.distributed.kv_events",
        "BlockStored",
        (_ANY, "block_hashes parent_block_hash token_ids block_size"),
        (">=0.10.2", "medium"),
        (">=0.17", "extra_keys"),
        (">=0.20", "group_idx"),
        (">=0.26", "locality"),
        (">=0.30", "session_id"),
        (">=0.33", "lookahead_token_ids"),
    ),
    *_has(
        "vllm.distributed.kv_events",
        "BlockRemoved",
        (_ANY, "block_hashes"),
        (">=0.10.2", "medium"),
        (">=0.20", "group_idx"),
        (">=0.26", "locality"),
    ),
    *_has(
        "vllm.v1.core.kv_cache_utils",
        "FreeKVCacheBlockQueue",
        (_ANY, "num_free_blocks"),
        ("<0.10", "free_list_head"),
        (">=0.10", "fake_free_list_head fake_free_list_tail"),
    ),
    *_has(
        "vllm.v1.core.kv_cache_utils",
        "KVCacheBlock",
        (_ANY, "block_id block_hash _block_hash next_free_block prev_free_block ref_cnt is_null"),
        (">=0.24", "block_hash_num_tokens"),
    ),
    *_has(
        "vllm.v1.core.kv_cache_utils", "", (_ANY, "BlockHashWithGroupId _gen_lora_extra_hash_keys")
    ),
    *_has(
        "vllm.v1.kv_cache_interface",
        "KVCacheConfig",
        (_ANY, "kv_cache_groups kv_cache_tensors num_blocks"),
    ),
    *_has(
        "vllm.v1.kv_cache_interface",
        "KVCacheGroupSpec",
        (_ANY, "kv_cache_spec layer_names"),
        (">=0.29", "enable_kv_transfer"),
        (">=0.30", "host_resident"),
    ),
    *_has(
        "vllm.v1.kv_cache_interface", "KVCacheTensor", (_ANY, "size"), (">=0.29", "layer_stride")
    ),
    *_has(
        "vllm.v1.kv_cache_interface",
        "KVCacheSpec",
        (_ANY, "page_size_bytes"),
        (">=0.29", "prefix_cacheable"),
    ),
    *_has(
        "vllm.v1.kv_cache_interface",
        "FullAttentionSpec",
        (_ANY, "sliding_window"),
        (">=0.10", "attention_chunk_size"),
        (">=0.31", "prefix_replay_tokens"),
    ),
    *_has("vllm.v1.kv_cache_interface", "SlidingWindowSpec", (_ANY, "sliding_window")),
    *_has(
        "vllm.v1.kv_cache_interface",
        "MambaSpec",
        (">=0.9.2", "block_size"),
        (">=0.10.1", "mamba_type"),
        (">=0.10.2", "num_speculative_blocks"),
        (">=0.15", "mamba_cache_mode"),
        (">=0.29", "num_prefill_checkpoint_blocks"),
    ),
    *_has("vllm.v1.kv_cache_interface", "UniformTypeKVCacheSpecs", (">=0.11", "kv_cache_specs")),
)

_CONFIG = (
    *_has("vllm.config", "ObservabilityConfig", (_ANY, "otlp_traces_endpoint")),
    *_has(
        "vllm.config",
        "VllmConfig",
        (
            _ANY,
            "cache_config model_config parallel_config scheduler_config device_config "
            "kv_transfer_config lora_config speculative_config observability_config "
            "compilation_config",
        ),
        (">=0.31", "aux_output_config"),
        (">=0.33", "num_hash_lookahead_tokens"),
    ),
    *_has("vllm.config.aux_output", "AuxOutputConfig", (">=0.31", "enabled")),
    *_has(
        "vllm.config",
        "CacheConfig",
        (_ANY, "enable_prefix_caching"),
        (">=0.11.1", "kv_offloading_size"),
        (">=0.27", "use_replayssm"),
    ),
    *_has("vllm.config", "DeviceConfig", (_ANY, "device_type")),
    *_has("vllm.config", "LoRAConfig", (_ANY, "max_loras")),
    *_has("vllm.config", "KVTransferConfig", (_ANY, "kv_connector kv_connector_extra_config")),
    *_has(
        "vllm.config",
        "ModelConfig",
        (_ANY, "is_encoder_decoder served_model_name use_mla enable_sleep_mode quantization"),
        (_ANY, "architectures"),
        (">=0.14,<0.31", "enable_return_routed_experts"),
        (">=0.24", "is_diffusion"),
    ),
    *_has(
        "vllm.config",
        "ParallelConfig",
        (_ANY, "pipeline_parallel_size tensor_parallel_size world_size data_parallel_size"),
        (_ANY, "data_parallel_rank data_parallel_rank_local"),
        (">=0.10.2", "decode_context_parallel_size"),
        (">=0.12", "prefill_context_parallel_size"),
        (">=0.14", "use_ubatching data_parallel_index"),
        (">=0.17", "enable_elastic_ep"),
        (">=0.27", "enable_fault_tolerance"),
    ),
    *_has(
        "vllm.config",
        "SchedulerConfig",
        (_ANY, "long_prefill_token_threshold enable_chunked_prefill max_num_batched_tokens"),
        (">=0.10", "async_scheduling"),
    ),
    *_has(
        "vllm.config",
        "CompilationConfig",
        (_ANY, "static_forward_context"),
        (">=0.10.1", "cudagraph_mode"),
    ),
)

_WORKER = (
    *_has("vllm.v1.executor.abstract", "UniProcExecutor", ("<0.11.1", "driver_worker")),
    *_has("vllm.v1.executor.uniproc_executor", "UniProcExecutor", (">=0.11.1", "driver_worker")),
    *_has("vllm.v1.executor.abstract", "Executor", (">=0.11.1", "is_sleeping")),
    *_has("vllm.v1.worker.worker_base", "WorkerBase", (_ANY, "model_runner rank vllm_config")),
    *_has(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner",
        (_ANY, "kv_caches kv_cache_config vllm_config device get_model input_batch"),
        (">=0.15", "_get_slot_mappings"),
    ),
    *_has("vllm.v1.worker.gpu_input_batch", "InputBatch", (_ANY, "block_table")),
    *_has("vllm.v1.worker.block_table", "MultiGroupBlockTable", (_ANY, "block_tables")),
    *_has("vllm.v1.worker.block_table", "BlockTable", (_ANY, "slot_mapping")),
    *_has("vllm.v1.utils", "CpuGpuBuffer", (">=0.15", "gpu")),
    *_has(
        "vllm.v1.worker.gpu.model_runner",
        "GPUModelRunner",
        (">=0.12", "kv_caches kv_cache_config vllm_config device get_model cudagraph_manager"),
    ),
    *_has("vllm.attention.backends.abstract", "AttentionBackend", ("<0.14", "get_name")),
    *_has("vllm.v1.attention.backend", "AttentionBackend", (">=0.14", "get_name")),
    *_has("vllm.v1.attention.backend", "AttentionImpl", (">=0.14", "forward")),
    *_has(
        "vllm.model_executor.layers.attention.attention",
        "Attention",
        (">=0.16", "impl kv_cache attn_backend use_direct_call kv_sharing_target_layer_name"),
    ),
    *_has("vllm.model_executor.layers.linear", "QKVParallelLinear", (_ANY, "num_kv_head_replicas")),
    *_has(
        "vllm.v1.outputs",
        "ModelRunnerOutput",
        (_ANY, "req_ids sampled_token_ids"),
    ),
    *_has(
        "vllm.v1.worker.gpu_model_runner",
        "AsyncGPUModelRunnerOutput",
        (">=0.10.2", "_model_runner_output"),
    ),
    *_has(
        "vllm.v1.worker.gpu_model_runner",
        "AsyncGPUPoolingModelRunnerOutput",
        (">=0.14", "_model_runner_output"),
    ),
    *_has(
        "vllm.v1.worker.gpu.async_utils",
        "AsyncOutput",
        (">=0.12", "model_runner_output"),
    ),
    *_has(
        "vllm.v1.worker.gpu.async_utils",
        "AsyncPoolingOutput",
        (">=0.17", "model_runner_output"),
    ),
)

ATTRIBUTES = (*_SCHEDULER, *_REQUEST, *_CACHE, *_CONFIG, *_WORKER)
