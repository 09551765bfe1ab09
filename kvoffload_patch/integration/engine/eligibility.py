"""Whether a vLLM configuration is one in which the tier is known to be right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from kvoffload_patch.config import Settings
from kvoffload_patch.integration import kvcached
from kvoffload_patch.integration.engine import eligible_states
from kvoffload_patch.integration.engine.adapters.vllm_experts import limits_hits
from kvoffload_patch.integration.engine.adapters.vllm_groups import (
    hits_parts,
    is_cached,
    keeps_state,
    kinds,
    members,
)
from kvoffload_patch.integration.errors import TierNotNeeded, TierRefused
from kvoffload_patch.integration.install import older_than, release_in_use
from kvoffload_patch.integration.spec_kinds import KNOWN_SPECS, STATE_SPEC, UNCACHED_SPECS
from kvoffload_patch.patching import is_set_on

# Of the known specs, those of which ranks can hold a part of each block (decode context parallel).
_SHARDED_SPECS = {"FullAttentionSpec", "MLAAttentionSpec"}
# Releases of vLLM and devices on which hits that end within a block came out right.
_PARTS_SHOWN = (
    ("0.28.0", "cuda"),
    *product(("0.30.0", "0.31.0", "0.32.0", "0.33.0"), ("cpu", "cuda")),
)
# Releases of vLLM and devices on which prompts that ranks divided between them came back.
_PREFILL_SHOWN = tuple(
    product(("0.26.0", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0"), ("cuda",))
)
# vLLM's own connectors that keep blocks in CPU memory (from 0.11.0, 0.19 and 0.33 on; the last is
# in none of its lists, and named with its module).
_OFFLOADERS = {"OffloadingConnector", "SimpleCPUOffloadConnector", "UMBPStoreConnector"}
# Releases of vLLM and devices on which answers beside kvcached were compared with plain vLLM's.
_KVCACHED_SHOWN: tuple[tuple[str, str], ...] = (("0.26.0", "cuda"),)
_REMEDY = "set KVOFFLOAD_STRICT=0 to serve without the CPU tier"
_WITHOUT_KVCACHED = "or start without it (KVCACHED_AUTOPATCH=0)"
_TRIES = eligible_states.TRIES
_PARTS = (
    "hits that end within a block (a --prefix-match-unit smaller than a block, or states with "
    "decode context parallelism)"
)


def check_eligible(vllm_config: Any, scheduler: Any) -> tuple[str, ...]:
    """Refuse what the tier does not understand.

    Returns:
        What nobody has run, each in words, where KVOFFLOAD_ALLOW_UNVERIFIED is on; else nothing.

    Raises:
        TierNotNeeded: prefix caching is off, or the model has no KV cache.
        TierRefused: anything else that the tier cannot vouch for.
    """
    cache = vllm_config.cache_config
    if not cache.enable_prefix_caching:
        raise TierNotNeeded("prefix caching is off, so there is nothing to keep; no CPU tier.")
    if not scheduler.kv_cache_config.kv_cache_groups:
        raise TierNotNeeded("this model has no KV cache; no CPU tier.")
    groups = scheduler.kv_cache_config.kv_cache_groups
    if not any(is_cached(group.kv_cache_spec) for group in groups):
        raise TierNotNeeded("this model keeps nothing in the prefix cache; no CPU tier.")
    for found in (
        _parallel_problem(vllm_config, groups),
        _model_problem(vllm_config, scheduler),
        _cache_problem(vllm_config, scheduler),
    ):
        if found:
            raise TierRefused(f"{found}; {_REMEDY}.")
    doubts = tuple(dict.fromkeys(_doubts(vllm_config, scheduler)))
    if doubts and not Settings.from_env().allow_unverified:
        raise TierRefused(f"{doubts[0]}; {_REMEDY}.")
    return doubts


def _doubts(vllm_config: Any, scheduler: Any) -> Iterator[str]:
    """What nobody has run, though nothing is known to be wrong with it."""
    yield from _divided_prompts(vllm_config)
    yield from _divided_blocks(vllm_config, scheduler.kv_cache_config.kv_cache_groups)
    yield from _hits_of_parts(vllm_config, scheduler)
    if getattr(vllm_config.model_config, "is_diffusion", False):
        yield (
            "expected tokens that are computed once, found a diffusion model, which computes those "
            f"of a canvas again and again ({_TRIES})"
        )
    transfers = getattr(vllm_config, "kv_transfer_config", None)
    if transfers is not None:
        yield from _offloaders(transfers.kv_connector, transfers.kv_connector_extra_config)
    if kvcached.is_elastic(scheduler.kv_cache_manager.block_pool):
        for unseen in _kvcached_doubts(vllm_config, scheduler):
            yield f"beside kvcached: {unseen} ({_TRIES}), {_WITHOUT_KVCACHED}"
    for index, group in enumerate(scheduler.kv_cache_config.kv_cache_groups):
        if keeps_state(group.kv_cache_spec):
            for doubt in eligible_states.doubts(vllm_config, scheduler, group.kv_cache_spec):
                yield f"KV cache group {index}: {doubt} ({_TRIES})"


def _hits_of_parts(vllm_config: Any, scheduler: Any) -> Iterator[str]:
    """What has not been run with hits that end within a block."""
    if not hits_parts(scheduler):
        return
    release, device = release_in_use(), vllm_config.device_config.device_type
    if (release, device) not in _PARTS_SHOWN:
        yield (
            f"expected prefix cache hits of whole blocks, or a release with which others were run "
            f"({_shown(_PARTS_SHOWN)}), found {_PARTS} with {release} on {device} ({_TRIES})"
        )
    for name in ("speculative_config", "kv_transfer_config"):
        if getattr(vllm_config, name, None) is not None:
            yield f"expected no {name} beside {_PARTS}, found one ({_TRIES})"


def _divided_prompts(vllm_config: Any) -> Iterator[str]:
    """What has not been run where ranks divide a prompt between them."""
    parallel = vllm_config.parallel_config
    prefill = getattr(parallel, "prefill_context_parallel_size", 1)
    if prefill == 1:
        return
    release, device = release_in_use(), vllm_config.device_config.device_type
    if (release, device) not in _PREFILL_SHOWN:
        yield (
            "expected prefill_context_parallel_size 1, or a release with which more were run "
            f"({_shown(_PREFILL_SHOWN)}), found {prefill} with {release} on {device} ({_TRIES})"
        )
    decode = getattr(parallel, "decode_context_parallel_size", 1)
    if decode > 1:
        yield (
            f"expected decode_context_parallel_size 1 beside prefill_context_parallel_size "
            f"{prefill}, found {decode} ({_TRIES})"
        )


def _divided_blocks(vllm_config: Any, groups: Sequence[Any]) -> Iterator[str]:
    """What has not been run where ranks have a part of each block of some groups alone."""
    decode = getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1)
    if decode > 1 and len(groups) > 1:
        yield f"{_of_several_groups(vllm_config, decode, groups)} ({_TRIES})"


def _shown(runs: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{release} on {device}" for release, device in runs)


def _offloaders(connector: str | None, extra: Mapping[str, Any]) -> Iterator[str]:
    """Why nobody has run the tier beside a KV connector, or one that is within it."""
    if connector in _OFFLOADERS:
        yield (
            f"expected one tier beside the GPU's cache, found {connector} in --kv-transfer-config, "
            f"which keeps the same blocks once more ({_TRIES}); leave one of the two out"
        )
    if connector == "MultiConnector":
        for one in extra.get("connectors", ()):
            within = one.get("kv_connector_extra_config", {})
            yield from _offloaders(one.get("kv_connector"), within)


def _parallel_problem(vllm_config: Any, groups: Sequence[Any]) -> str | None:
    parallel = vllm_config.parallel_config
    decode = getattr(parallel, "decode_context_parallel_size", 1)
    if decode > 1 and not _can_be_divided(vllm_config, groups):
        return _of_several_groups(vllm_config, decode, groups)
    if getattr(parallel, "enable_elastic_ep", False):
        return "expected a fixed set of workers, found elastic expert parallelism"
    if getattr(parallel, "enable_fault_tolerance", False):
        return (
            "expected an engine that ends with a step that fails, found enable_fault_tolerance, "
            "with which it goes on with the prefix cache of steps that nobody has carried out"
        )
    return _empty_step_problem(vllm_config)


def _of_several_groups(vllm_config: Any, decode: int, groups: Sequence[Any]) -> str:
    # A drafting model whose layers ranks do not divide has a group of its own.
    drafts = len(groups) > 1 and getattr(vllm_config, "speculative_config", None) is not None
    left_out = "--decode-context-parallel-size" + " or --speculative-config" * drafts
    return (
        f"expected one KV cache group of full attention with decode_context_parallel_size "
        f"{decode}, found {len(groups)} with {', '.join(sorted(kinds(groups)))}; leave out "
        f"{left_out}"
    )


def _can_be_divided(vllm_config: Any, groups: Sequence[Any]) -> bool:
    """Whether every rank has a part of each block of attention, and all of other ones.

    The tier asks vLLM's managers how many tokens a group's blocks have, and each rank copies what
    it has. Up to 0.28 vLLM counts a state's block as one that ranks divide.
    """
    of_all = kinds(groups)
    if len(groups) == 1 or older_than("0.30"):
        return len(groups) == 1 and of_all <= _SHARDED_SPECS
    if STATE_SPEC in of_all and getattr(vllm_config, "speculative_config", None) is not None:
        return False  # random runs over plain vLLM's scheduler have given wrong tokens
    return bool(of_all & _SHARDED_SPECS) and of_all <= _SHARDED_SPECS | {STATE_SPEC}


def _empty_step_problem(vllm_config: Any) -> str | None:
    """Up to 0.10.1 steps without tokens stay in the batch queue, and parked loads with them."""
    if not older_than("0.10.2"):
        return None
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1:
        return f"expected one pipeline stage before vLLM 0.10.2, found {stages}"
    if getattr(vllm_config.scheduler_config, "async_scheduling", False):
        return "expected synchronous scheduling before vLLM 0.10.2, found asynchronous"
    return None


def _model_problem(vllm_config: Any, scheduler: Any) -> str | None:
    if vllm_config.model_config.is_encoder_decoder:
        return "expected a decoder-only model, found an encoder-decoder one"
    if _returns_routed_experts(vllm_config) and not limits_hits(scheduler):
        return (
            "expected vLLM 0.33 or later with --enable-return-routed-experts, found "
            f"{release_in_use()}, which keeps what it returns of each token apart from blocks "
            "and does not know which blocks have it, so that the tier would bring some back "
            "without; leave one of the two out"
        )
    return None


def _returns_routed_experts(vllm_config: Any) -> bool:
    """Whether answers tell which experts computed each token, those of a hit included.

    Up to 0.30 the scheduler has them by the numbers of GPU blocks, later the worker by keys, of
    which it keeps about as many as the GPU has blocks.
    """
    outputs = getattr(vllm_config, "aux_output_config", None)
    if outputs is not None and outputs.enabled:
        return True
    return bool(getattr(vllm_config.model_config, "enable_return_routed_experts", False))


def _cache_problem(vllm_config: Any, scheduler: Any) -> str | None:
    if getattr(vllm_config.cache_config, "kv_offloading_size", None) is not None:
        return (
            "expected one tier in CPU memory, found --kv-offloading-size as well, with which vLLM "
            "keeps the same blocks there once more; leave one of the two out"
        )
    if kvcached.is_elastic(scheduler.kv_cache_manager.block_pool):
        problem = _kvcached_problem(vllm_config, scheduler)
        if problem:
            return f"beside kvcached: {problem}, {_WITHOUT_KVCACHED}"
    if hits_parts(scheduler):
        problem = _parts_problem(
            [g.kv_cache_spec for g in scheduler.kv_cache_config.kv_cache_groups]
        )
        if problem:
            return f"beside {_PARTS}: {problem}"
    if is_set_on(scheduler.kv_cache_manager.coordinator, "find_longest_cache_hit"):
        return "expected the coordinator's own find_longest_cache_hit, found one set by others"
    for index, group in enumerate(scheduler.kv_cache_config.kv_cache_groups):
        problem = _group_problem(group)
        if problem is None and keeps_state(group.kv_cache_spec):
            problem = eligible_states.problem(vllm_config, group.kv_cache_spec)
        if problem:
            return f"KV cache group {index}: {problem}"
    return None


def _parts_problem(specs: Sequence[Any]) -> str | None:
    """Why whole blocks cannot be told from parts; None if they can."""
    sizes = sorted({spec.block_size for spec in specs})
    if len(sizes) > 1:
        return f"expected blocks of one size, found such of {', '.join(map(str, sizes))} tokens"
    if any(eligible_states.leaves_some_within_a_step(members(spec)) for spec in specs):
        return (
            "expected states that a step leaves at its end, found some that it leaves within "
            "(Mamba 2), whose blocks get another key after they are told to be whole"
        )
    return None


def _kvcached_problem(vllm_config: Any, scheduler: Any) -> str | None:
    """Why the tier would not be right over kvcached's pool; None if it is."""
    pool, settings = scheduler.kv_cache_manager.block_pool, Settings.from_env()
    if not hasattr(pool, "cached_block_hashes_by_block"):
        return f"expected a pool with vLLM's own keys (vLLM 0.26), found {release_in_use()}"
    workers = int(getattr(vllm_config.parallel_config, "world_size", 1))
    if workers > 1:
        return f"expected one worker, because only one says what it has copied, found {workers}"
    if settings.store == "lazy":
        return (
            "expected KVOFFLOAD_STORE=auto or eager, because blocks lose their memory as soon as "
            "nobody uses them, found lazy"
        )
    return None


def _kvcached_doubts(vllm_config: Any, scheduler: Any) -> Iterator[str]:
    """What has not been run over kvcached's pool."""
    release, device = release_in_use(), vllm_config.device_config.device_type
    if (release, device) not in _KVCACHED_SHOWN:
        yield (
            f"expected a release that was run ({_shown(_KVCACHED_SHOWN)}), found {release} on "
            f"{device}"
        )
    yield from kvcached.unknown(scheduler.kv_cache_manager.block_pool)
    groups = scheduler.kv_cache_config.kv_cache_groups
    if len(groups) != 1 or kinds(groups) != {"FullAttentionSpec"}:
        found = f"{len(groups)} with {', '.join(sorted(kinds(groups)))}"
        yield f"expected one KV cache group of full attention, found {found}"
    for name in ("speculative_config", "kv_transfer_config"):
        if getattr(vllm_config, name, None) is not None:
            yield f"expected no {name}, found one"
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        yield "expected no sleep mode, found it on"


def _group_problem(group: Any) -> str | None:
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        return "expected a group that lives in device memory, found one kept elsewhere"
    for member in members(group.kv_cache_spec):
        kind = type(member).__name__
        if kind == STATE_SPEC:
            continue
        if not is_cached(member):
            if kind not in UNCACHED_SPECS:
                known = ", ".join(sorted(UNCACHED_SPECS))
                return f"expected one of {known} outside of the prefix cache, found {kind}"
            continue
        if kind not in KNOWN_SPECS:
            return f"expected one of {', '.join(sorted(KNOWN_SPECS))}, found {kind}"
        if getattr(member, "prefix_replay_tokens", 0):
            return (
                f"expected a prefix replay window outside of the prefix cache, found {kind} in it"
            )
    return None
