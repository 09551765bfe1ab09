"""vLLM's own parts of a scheduler, built for whatever release is imported, by feature."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from functools import cache
from math import lcm
from types import SimpleNamespace
from typing import Any

from scheduler_half.device import BLOCK, Chunk, Replay, Ring
from scheduler_half.sizes import Replicated, Wide, hash_size
from scheduler_half.states import CHECKPOINTS, EVERY, KINDS

MAX_TOKENS = 256  # of a step
_OWN_SIZE = (Wide, Replicated, Ring)  # which say how many tokens a block has


class Missing(SimpleNamespace):
    """A configuration in which whatever it was not told is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Grammars:
    """A structured output manager for requests that have none."""

    def should_advance(self, *_: Any, **__: Any) -> bool:
        return False

    def accept_tokens(self, *_: Any, **__: Any) -> bool:
        return True

    def validate_tokens(self, _: Any, drafted: list[int]) -> list[int]:
        return drafted

    def grammar_bitmask(self, *_: Any, **__: Any) -> None:
        return None


def make_config(in_flight: int = 1, shards: int = 1) -> Any:
    """What a scheduler reads of a `VllmConfig`, with ``in_flight`` steps under way at once.

    ``shards``: ranks that each hold a part of every block's tokens.
    """
    scheduler = Missing(
        max_num_seqs=8, max_num_batched_tokens=MAX_TOKENS, max_model_len=2048, policy="fcfs",
        async_scheduling=in_flight > 1, long_prefill_token_threshold=0, watermark=0.0,
        chunked_prefill_enabled=True, enable_chunked_prefill=True, max_num_encoder_input_tokens=0,
        encoder_cache_size=0, scheduler_reserve_full_isl=True,
    )  # fmt: skip
    parallel = Missing(
        data_parallel_rank=0, data_parallel_index=0, pipeline_parallel_size=1,
        decode_context_parallel_size=shards, prefill_context_parallel_size=1, world_size=1,
    )  # fmt: skip
    model = Missing(
        max_model_len=2048, is_encoder_decoder=False, is_multimodal_model=False,
        supports_multimodal_inputs=False, runner_type="generate",
    )  # fmt: skip
    return Missing(
        scheduler_config=scheduler,
        cache_config=Missing(
            block_size=BLOCK, enable_prefix_caching=True, prefix_caching_hash_algo="sha256"
        ),
        model_config=model,
        parallel_config=parallel,
        observability_config=Missing(),
        aux_output_config=Missing(),
        ec_manager_config=Missing(get_encoder_cache_manager_obj=lambda: None),
        num_speculative_tokens=0,
        num_lookahead_tokens=0,
        num_prefill_lookahead_tokens=0,
        num_hash_lookahead_tokens=0,
        max_concurrent_batches=in_flight,
        max_in_flight_tokens=in_flight * MAX_TOKENS,
    )


def make_scheduler(
    config: Any,
    blocks: int,
    windows: Sequence[int | str | None] = (None,),
    retention: int | None = None,
    unit: int = 0,
) -> Any:
    """vLLM's scheduler.

    Args:
        config: of the engine; asynchronous scheduling takes the scheduler for that.
        blocks: GPU blocks, the null block included.
        windows: a KV cache group for each: its sliding window, None for full attention, a Chunk,
            STATE, CHECKPOINTS or EVERY.
        unit: tokens after which a hit may end, a part of a block; 0: blocks as a whole.
    """
    for window in set(KINDS) & set(windows):
        vars(config.cache_config).update(_mode_of(window))
    config.cache_config.num_gpu_blocks = blocks
    kv_cache_config = make_kv_cache_config(blocks, windows, _drafts(config), retention)
    size = block_size(config)
    from vllm.v1.core.sched.scheduler import Scheduler

    more: dict[str, Any] = {}
    if isinstance(config, Missing):
        more["mm_registry"] = SimpleNamespace(supports_multimodal_inputs=lambda *_: False)
    made = Scheduler
    if config.scheduler_config.async_scheduling:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler as made
    of_all = lcm(size, *(one for one in windows if isinstance(one, (Wide, Replicated))))
    scheduler = _call(
        made,
        Scheduler,
        vllm_config=config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=_grammars(config),
        block_size=of_all if "hash_block_size" in _parameters(Scheduler) else size,
        hash_block_size=unit or hash_size(windows, size // BLOCK),
        log_stats=True,
        **more,
    )
    if any(isinstance(window, Replay) for window in windows):
        scheduler.use_v2_model_runner = True  # which alone computes the end of a hit again
    return scheduler


def _mode_of(kind: Any) -> dict[str, str]:
    """Whether vLLM is to keep a state in each block, or as many as a request needs."""
    return {"mamba_cache_mode": "all" if kind == EVERY else "align"}


def _drafts(config: Any) -> int:
    """Tokens that are drafted in a step; a configuration that says nothing else is told of them."""
    if isinstance(config, Missing) and config.speculative_config is not None:
        read = config.speculative_config.use_eagle()  # by layers that take tokens ahead
        config.num_speculative_tokens = config.speculative_config.num_speculative_tokens
        config.num_lookahead_tokens = config.num_speculative_tokens * read
        config.num_prefill_lookahead_tokens = config.speculative_config.hash_lookahead or int(read)
        config.num_hash_lookahead_tokens = config.speculative_config.hash_lookahead
    return int(getattr(config, "num_speculative_tokens", 0))


def block_size(config: Any) -> int:
    """Tokens of a block over all ranks that hold a part of it."""
    return BLOCK * config.parallel_config.decode_context_parallel_size


def make_kv_cache_config(
    blocks: int,
    windows: Sequence[int | str | None] = (None,),
    drafts: int = 0,
    retention: int | None = None,
) -> Any:
    """A `KVCacheConfig` without tensors; of ``drafts`` tokens a step each has a state.

    ``retention``: tokens between blocks of windows and states that vLLM keeps in its prefix cache
    besides those of a prompt's end, where a release says it; None: it keeps all.
    """
    import torch
    from vllm.v1 import kv_cache_interface as kv

    groups = []
    for index, window in enumerate(windows):
        about: dict[str, Any] = {
            "block_size": int(window) if isinstance(window, _OWN_SIZE) else BLOCK,
            "num_kv_heads": 2, "head_size": 16, "dtype": torch.float32, "use_mla": False,
        }  # fmt: skip
        whole = isinstance(window, Replicated)
        if window in KINDS:
            about |= {"shapes": ((16,),), "dtypes": (torch.float32,), **_mode_of(window)}
            about |= {"num_speculative_blocks": drafts} if drafts else {}
            if window == CHECKPOINTS:
                about |= {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1}
            spec = _call(kv.MambaSpec, kv.MambaSpec, **about)
        elif window is None or isinstance(window, (Wide, Replicated)):
            about["dcp_sharded"] = not whole
            spec = _call(kv.FullAttentionSpec, kv.FullAttentionSpec, **about)
        elif isinstance(window, Chunk):
            made = kv.ChunkedLocalAttentionSpec
            spec = _call(made, made, **about, attention_chunk_size=int(window))
        elif isinstance(window, Replay):
            about |= {"sliding_window": int(window), "bounded_replay": True}
            spec = _call(kv.SlidingWindowMLASpec, kv.SlidingWindowMLASpec, **about)
        elif isinstance(window, Ring):
            spec = _call(kv.CircularBufferSpec, kv.CircularBufferSpec, **about)
        else:
            spec = _call(kv.SlidingWindowSpec, kv.SlidingWindowSpec, **about, sliding_window=window)
        groups.append(kv.KVCacheGroupSpec([f"layers.{index}"], spec))
        groups[-1].is_eagle_group = whole
    name = "prefix_cache_retention_interval"
    more = {name: retention} if name in _parameters(kv.KVCacheConfig) else {}
    return kv.KVCacheConfig(blocks, [], groups, **more)


def make_request(
    name: str,
    prompt: list[int],
    count: int,
    priority: int = 0,
    size: int = BLOCK,
    lookahead: int = 0,
    salt: str | None = None,
    resumable: bool = False,
    lora_request: Any = None,
    **sampling: Any,
) -> Any:
    """A request for ``count`` tokens, with whatever hashes its blocks of ``size`` tokens.

    Args:
        lookahead: tokens behind a block that its hash has as well.
        salt: of its prefix.
        resumable: it is a session that may go on.
        lora_request: the adapter that it names.
        sampling: more arguments of `SamplingParams`.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    return _call(
        Request,
        Request,
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=count, ignore_eos=True, **sampling),
        cache_salt=salt,
        resumable=resumable,
        lora_request=lora_request,
        block_hasher=hasher(size, lookahead),
        priority=priority,
        arrival_time=time.time(),
    )


def make_output(names: list[str], sampled: list[list[int]]) -> Any:
    """A `ModelRunnerOutput`."""
    import numpy
    from vllm.v1.outputs import ModelRunnerOutput

    kind = ModelRunnerOutput.__annotations__["sampled_token_ids"]
    tokens: Any = sampled
    if "ndarray" in str(kind):  # 0.11.1 and 0.11.2
        tokens = [numpy.array(one, dtype=numpy.int32) for one in sampled]
    return _call(
        ModelRunnerOutput,
        ModelRunnerOutput,
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=tokens,
        prompt_logprobs_dict={},
    )


@cache
def hasher(size: int = BLOCK, lookahead: int = 0) -> Any:
    """What gives requests the hashes of their blocks; None up to 0.10.0, where managers do it."""
    from vllm.v1.core import kv_cache_utils

    try:
        from vllm.utils.hashing import sha256
    except ImportError:
        from vllm.utils import sha256
    if hasattr(kv_cache_utils, "init_none_hash"):
        kv_cache_utils.init_none_hash(sha256)
    make = getattr(kv_cache_utils, "get_request_block_hasher", None)
    return make and make(size, sha256, *([lookahead] if lookahead else []))


def _grammars(config: Any) -> Any:
    if isinstance(config, Missing):
        return _Grammars()
    from vllm.v1.structured_output import StructuredOutputManager

    return StructuredOutputManager(config)


@cache  # a request is made for each prompt, an output for each step
def _parameters(like: Callable[..., Any]) -> Any:
    return inspect.signature(like).parameters


def _call(made: Callable[..., Any], like: Callable[..., Any], **wanted: Any) -> Any:
    """Call with those of the arguments that ``like`` has, and None for others that it needs."""
    known = _parameters(like)
    arguments = {name: value for name, value in wanted.items() if name in known}
    for name, parameter in known.items():
        if parameter.default is parameter.empty:
            arguments.setdefault(name, None)
    return made(**arguments)
