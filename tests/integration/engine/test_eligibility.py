"""Configurations that the tier refuses, and the one that it stays out of."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload_patch.integration import kvcached
from kvoffload_patch.integration.engine import eligibility
from kvoffload_patch.integration.engine.attach import attach
from kvoffload_patch.integration.engine.eligibility import (
    _OFFLOADERS,
    _PARTS_SHOWN,
    _PREFILL_SHOWN,
    check_eligible,
)
from kvoffload_patch.integration.engine.eligible_states import (
    DELTA_ATTENTION,
    STATES_AT_EVERY_BLOCK_SHOWN,
    STATES_BESIDE_A_CONNECTOR_SHOWN,
    STATES_OF_DRAFTS_SHOWN,
    STATES_ON_STAGES_SHOWN,
    STATES_SHOWN,
)
from kvoffload_patch.integration.engine.hooks import init_v0
from kvoffload_patch.integration.errors import TierNotNeeded, TierRefused
from kvoffload_patch.integration.install import older_than
from kvoffload_patch.integration.patch_table.verified import RELEASES
from kvoffload_patch.integration.spec_kinds import KNOWN_SPECS, STATE_SPEC, UNCACHED_SPECS
from scripts import ROOT
from scripts.matrix import features, features_gpu
from scripts.matrix.features_rows import ROWS


def spec(kind: str, **attributes: Any) -> Any:
    """A KV cache spec of a class with this name."""
    made = type(kind, (), {})()
    vars(made).update(attributes)
    return made


def group(kind: str = "FullAttentionSpec", **attributes: Any) -> SimpleNamespace:
    """A KV cache group."""
    return SimpleNamespace(kv_cache_spec=spec(kind, **attributes))


def config(**changes: Any) -> SimpleNamespace:
    """vLLM's configuration, of which the tier approves but for the changes."""
    other = (
        "caching", "encoder_decoder", "async_scheduling", "device", "replayssm", "offloading",
        "connectors", "diffusion", "routed_experts", "outputs", "speculative_config",
        "num_hash_lookahead_tokens", "architectures",
    )  # fmt: skip
    parallel = {k: v for k, v in changes.items() if k not in other}
    parallel.setdefault("pipeline_parallel_size", 1)
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            enable_prefix_caching=changes.get("caching", True),
            use_replayssm=changes.get("replayssm", False),
            kv_offloading_size=changes.get("offloading"),
        ),
        parallel_config=SimpleNamespace(**parallel),
        scheduler_config=SimpleNamespace(async_scheduling=changes.get("async_scheduling", False)),
        model_config=SimpleNamespace(
            is_encoder_decoder=changes.get("encoder_decoder", False),
            is_diffusion=changes.get("diffusion", False),
            architectures=changes.get("architectures", []),
            enable_return_routed_experts=changes.get("routed_experts", False),
        ),
        aux_output_config=changes.get("outputs", SimpleNamespace(enabled=False)),
        device_config=SimpleNamespace(device_type=changes.get("device", "cpu")),
        kv_transfer_config=changes.get("connectors"),
        speculative_config=changes.get("speculative_config"),
        num_hash_lookahead_tokens=changes.get("num_hash_lookahead_tokens", 0),
    )


def transfers(connector: str | None, *within: Any) -> SimpleNamespace:
    """A --kv-transfer-config; with others within it, those of a MultiConnector.

    So every release from 0.9.1 to 0.33.0 has it: names, and a MultiConnector's as what a user
    wrote, which need not be complete.
    """
    extra = {"connectors": list(within)} if within else {"cpu_bytes_to_use": 1 << 30}
    return SimpleNamespace(kv_connector=connector, kv_connector_extra_config=extra)


OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
SIMPLE = {
    "kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30},
}  # fmt: skip
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def scheduler(*groups: Any, connector: Any = None, **coordinator: Any) -> SimpleNamespace:
    """A scheduler over these groups."""
    return SimpleNamespace(
        connector=connector,
        kv_cache_manager=SimpleNamespace(
            coordinator=SimpleNamespace(**coordinator), block_pool=SimpleNamespace()
        ),
        kv_cache_config=SimpleNamespace(kv_cache_groups=list(groups) or [group()]),
    )


STATE = {
    "mamba_cache_mode": "align", "num_speculative_blocks": 0,
    "mamba_type": SimpleNamespace(name="GDN_ATTN"),
}  # fmt: skip


def states(**changes: Any) -> SimpleNamespace:
    """A scheduler of full attention beside layers that keep a state."""
    return scheduler(group(), group("MambaSpec", **{**STATE, **changes}))


def with_v2(made: SimpleNamespace) -> SimpleNamespace:
    """A scheduler whose workers have model runner V2."""
    made.use_v2_model_runner = True
    return made


def parts(**changes: Any) -> SimpleNamespace:
    """The same, with hits that may end within a block."""
    state = group("MambaSpec", **{**STATE, "block_size": 16, **changes})
    return scheduler(group(block_size=16), state, enable_partial_hash_hits=True)


def elastic(*groups: Any, without: str = "") -> SimpleNamespace:
    """A scheduler whose coordinator kvcached has given a pool of its own class."""
    made = scheduler(*groups)
    pool = type("ElasticBlockPool", (), {"__module__": "kvcached.integration.vllm.patches"})()
    vars(pool).update({"cached_block_hashes_by_block": {}})
    vars(pool).pop(without, None)
    made.kv_cache_manager.block_pool = pool
    return made


UNIFORM = spec(
    "UniformTypeKVCacheSpecs",
    kv_cache_specs={"a": spec("MLAAttentionSpec"), "b": spec("MambaSpec", **STATE)},
)
UNKNOWN = spec(
    "UniformTypeKVCacheSpecs",
    kv_cache_specs={"a": spec("MLAAttentionSpec"), "b": spec("SinkSpec")},
)
REFUSED = {
    "decode context parallel, windows": (
        config(decode_context_parallel_size=2),
        scheduler(group(), group("SlidingWindowSpec")),
        "one KV .* 2 with FullAttentionSpec, SlidingWindowSpec; leave out --decode-[a-z-]+size;",
    ),
    "decode context parallel, windows and drafts": (
        config(decode_context_parallel_size=2, speculative_config=object()),
        scheduler(group(), group("SlidingWindowSpec")),
        "SlidingWindowSpec; leave out --decode-[a-z-]+size or --speculative-config;",
    ),
    "decode context parallel, states and drafts": (
        config(decode_context_parallel_size=2, speculative_config=object()), states(),
        "FullAttentionSpec, MambaSpec; leave out --decode-[a-z-]+size or --speculative-config; set",
    ),
    "decode context parallel, full attention twice": (
        config(decode_context_parallel_size=2, speculative_config=object()),
        scheduler(group(), group()),
        r"found 2 with FullAttentionSpec; leave out --decode-[a-z-]+size or --speculative-config "
        r"\(KVOFFLOAD_ALLOW_UNVERIFIED=1 tries it\);",
    ),
    "decode context parallel, states": (
        config(decode_context_parallel_size=2), states(),
        r"found 2 with FullAttentionSpec, MambaSpec; leave out --decode-[a-z-]+size \(KVOFFLOAD_A",
    ),
    "decode context parallel, a window alone": (
        config(decode_context_parallel_size=2), scheduler(group("SlidingWindowSpec")),
        "found 1 with SlidingWindowSpec; leave out --decode-context-parallel-size;",
    ),
    "prefill context parallel": (
        config(prefill_context_parallel_size=4), scheduler(),
        r"prefill_context_parallel_size 1, or .* run \(0.26.0 on cuda, .*\), found 4 with ",
    ),
    "prefill and decode context parallel": (
        config(device="cuda", prefill_context_parallel_size=2, decode_context_parallel_size=2),
        scheduler(group("MLAAttentionSpec")),
        "decode_context_parallel_size 1 beside prefill_context_parallel_size 2, found 2",
    ),
    "stages before 0.10.2": (
        config(pipeline_parallel_size=2), scheduler(), "pipeline stage before vLLM 0.10.2, found 2",
    ),
    "asynchronous scheduling before 0.10.2": (
        config(async_scheduling=True), scheduler(), "before vLLM 0.10.2, found asynchronous",
    ),
    "elastic": (config(enable_elastic_ep=True), scheduler(), "elastic expert parallelism"),
    "an engine that goes on": (
        config(enable_fault_tolerance=True), scheduler(), "ends with a step that fails, found",
    ),
    "diffusion": (
        config(diffusion=True), scheduler(),
        r"computed once, found a diffusion model, .* \(KVOFFLOAD_ALLOW_UNVERIFIED=1 tries it\)",
    ),
    "experts of each token, by GPU block": (
        config(routed_experts=True), scheduler(),
        r"vLLM 0.33 or later with --enable-return-routed-experts, found \d.*; leave one of the two",
    ),
    "experts of each token, by key": (
        config(outputs=SimpleNamespace(enabled=True)), scheduler(), "which blocks have it, so that",
    ),
    "another tier in CPU memory": (
        config(offloading=4.0), scheduler(), "one tier in CPU memory, found --kv-offloading-size",
    ),
    "vLLM's own connectors that offload": (
        config(connectors=transfers("OffloadingConnector")), scheduler(),
        r"one tier .* found OffloadingConnector in --kv-transfer-config, .* \(KVOFFLOAD_ALLOW_UNV",
    ),
    "kvcached": (config(device="cuda"), elastic(), "beside kvcached: expected a release that was"),
    "kvcached, keys of its own": (
        config(), elastic(without="cached_block_hashes_by_block"), "a pool with vLLM's own keys",
    ),
    "kvcached, several workers": (config(world_size=2), elastic(), "one worker.* found 2"),
    "kvcached, stores that wait": (config(), elastic(), "STORE=auto or eager, .* found lazy"),
    "a lookup of others": (
        config(), scheduler(find_longest_cache_hit=object()), "own find_longest_cache_hit, found",
    ),
    "encoder-decoder": (config(encoder_decoder=True), scheduler(), "encoder-decoder"),
    "hits within a block": (
        config(device="xpu"), parts(), r"of whole blocks, .*0.32.0 on cpu.*\), found .* on xpu",
    ),
    "hits within a block, drafts": (
        config(speculative_config=object()), parts(), "expected no speculative_config beside hits",
    ),
    "hits within a block, another kind on a GPU": (
        config(device="cuda"), parts(mamba_type=SimpleNamespace(name="SHORT_CONV")),
        "gated delta nets where hits end within a block on a GPU, found SHORT_CONV",
    ),
    "hits within a block, checkpoints": (
        config(), parts(num_prefill_checkpoint_blocks=1),
        "beside hits .*: expected states that a step leaves at its end",
    ),
    "hits within a block, blocks of two sizes": (
        config(), parts(block_size=32),
        "beside hits .*: expected blocks of one size, found such of 16, 32",
    ),
    "unknown spec": (config(), scheduler(group(), group("SinkSpec")), "group 1: .*SinkSpec"),
    "subclass by another name": (
        config(), scheduler(group("SinkFullAttentionSpec")), "found SinkFullAttentionSpec",
    ),
    "unknown among many": (
        config(), scheduler(SimpleNamespace(kv_cache_spec=UNKNOWN)), "group 0: .*SinkSpec",
    ),
    "states beside attention in one group": (
        config(), scheduler(SimpleNamespace(kv_cache_spec=UNIFORM)), "found MLAAttentionSpec",
    ),
    "states at every block": (
        config(), states(mamba_cache_mode="all"),
        r"GDN_ATTN states at every block \(mode all\) were shown .* on cpu \(none\), found ",
    ),
    "states at every block beside drafts": (
        config(), states(mamba_cache_mode="all", num_speculative_blocks=2),
        "align mode beside drafts, found mode all",
    ),
    "states outside of the prefix cache": (
        config(), states(mamba_cache_mode="none"), "in mode align or all, found mode none",
    ),
    "states of drafts": (
        config(),
        states(mamba_type=SimpleNamespace(name="MAMBA2"), num_speculative_blocks=2),
        "MAMBA2 states beside speculative decoding were shown .* .none., found ",
    ),
    "states of drafts in stages": (
        config(pipeline_parallel_size=2), states(num_speculative_blocks=2),
        "one pipeline stage beside states of drafted tokens",
    ),
    "states of drafts, runner V2": (
        config(), with_v2(states(num_speculative_blocks=2)),
        "runner V1 beside states of drafted tokens with .* on cpu, found V2",
    ),
    "states within a step, on a GPU": (
        config(device="cuda"), states(num_prefill_checkpoint_blocks=1),
        "GDN_ATTN states that a step leaves at its end on a GPU, found some that it leaves within",
    ),
    "states within a step and keys with more": (
        config(num_hash_lookahead_tokens=2),
        states(num_speculative_blocks=2, num_prefill_checkpoint_blocks=1),
        "one token behind a block at most beside states .*, found 2",
    ),
    "states outside of blocks": (config(replayssm=True), states(), "--use-replayssm"),
    "states on a GPU": (config(device="xpu"), states(), r"come back on xpu .none., found "),
    "states of another kind": (
        config(), states(mamba_type=SimpleNamespace(name="CUSTOM")),
        "CUSTOM states were shown to come back on cpu .none., found ",
    ),
    "host memory": (
        config(),
        scheduler(SimpleNamespace(kv_cache_spec=spec("FullAttentionSpec"), host_resident=True)),
        "device memory",
    ),
    "no transfer": (
        config(),
        scheduler(
            SimpleNamespace(kv_cache_spec=spec("FullAttentionSpec"), enable_kv_transfer=False)
        ),
        "device memory",
    ),
    "replay": (
        config(),
        scheduler(group("SlidingWindowSpec", prefix_replay_tokens=8)),
        "replay window outside of the prefix cache, found SlidingWindowSpec in it",
    ),
    "unknown outside of the prefix cache": (
        config(),
        scheduler(group(), group("HiSparseHotSpec", prefix_cacheable=False)),
        "group 1: expected one of CircularBufferSpec, SlidingWindowMLASpec outside of .*HiSparse",
    ),
}  # fmt: skip


# The release that is taken for vLLM's, where others are refused for another reason, or not.
REFUSED_WITH = {
    "asynchronous scheduling before 0.10.2": "0.10.1.1",
    "hits within a block, another kind on a GPU": "0.32.0",
    "hits within a block, blocks of two sizes": "0.32.0",
    "hits within a block, checkpoints": "0.32.0",
    "hits within a block, drafts": "0.32.0",
    "prefill and decode context parallel": "0.32.0",
    "stages before 0.10.2": "0.10.1.1",
    "states of drafts, runner V2": "0.33.0",
    "states within a step, on a GPU": "0.33.0",
}


@pytest.fixture
def told(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Notes a refusal for docs/features.md, with the release that was taken for vLLM's."""

    def tell(refusal: Any, release: str | None) -> None:
        record_property("refusal", str(refusal.value))
        if release is not None:
            record_property("with_release", release)

    return tell


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_tier_cannot_vouch_for_is_refused(
    name: str, told: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_config, vllm_scheduler, what = REFUSED[name]
    if release := REFUSED_WITH.get(name):
        monkeypatch.setenv("KVOFFLOAD_VLLM_VERSION", release)
    if name == "kvcached, stores that wait":
        monkeypatch.setenv("KVOFFLOAD_STORE", "lazy")
    with pytest.raises(TierRefused) as refusal:
        check_eligible(vllm_config, vllm_scheduler)
    told(refusal, release)
    text = str(refusal.value)
    assert re.search(what, text)
    assert text.endswith("; set KVOFFLOAD_STRICT=0 to serve without the CPU tier.")
    assert not re.search(r"[.!?]\s", text) and "\n" not in text, "one sentence"


def test_without_prefix_caching_it_stays_out() -> None:
    with pytest.raises(TierNotNeeded, match="prefix caching is off") as reason:
        check_eligible(config(caching=False), scheduler())
    assert not issubclass(reason.type, TierRefused)


def test_without_a_kv_cache_it_stays_out() -> None:
    without = scheduler()
    without.kv_cache_config.kv_cache_groups = []
    with pytest.raises(TierNotNeeded, match="no KV cache"):
        check_eligible(config(), without)


def test_without_anything_in_the_prefix_cache_it_stays_out() -> None:
    ring = group("CircularBufferSpec", prefix_cacheable=False)
    with pytest.raises(TierNotNeeded, match="nothing in the prefix cache"):
        check_eligible(config(), scheduler(ring))


@pytest.mark.parametrize("kind", sorted(UNCACHED_SPECS))
def test_groups_outside_of_the_prefix_cache_are_approved(kind: str) -> None:
    left_out = spec(kind, prefix_cacheable=False, prefix_replay_tokens=8)
    uniform = spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": left_out, "b": left_out})
    uniform.prefix_cacheable = False
    for one in (left_out, uniform):
        asked = scheduler(group(), SimpleNamespace(kv_cache_spec=one))
        assert check_eligible(config(), asked) == ()


def test_another_scheduler_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("vllm")
    calls: list[str] = []
    executor = SimpleNamespace(collective_rpc=lambda f, **_: calls.append(f.__name__) or [])
    engine = SimpleNamespace(scheduler=scheduler(), model_executor=executor)
    before = dict(vars(engine.scheduler))
    with pytest.raises(TierRefused, match="found SimpleNamespace; set KVOFFLOAD_STRICT=0"):
        attach(engine, config())
    monkeypatch.setenv("KVOFFLOAD_STRICT", "0")
    calls.clear()
    attach(engine, config())
    assert calls == ["close_rank"], "memory that workers took while the model was loading"
    assert vars(engine.scheduler) == before
    ours = [r for r in caplog.records if r.name == "vllm.kvoffload_patch"]
    (record,) = [r for r in ours if r.levelno == logging.ERROR]
    assert record.getMessage().endswith("Serving without the CPU tier.")


def test_staying_out_comes_before_refusing() -> None:
    with pytest.raises(TierNotNeeded):
        check_eligible(config(caching=False, encoder_decoder=True), scheduler(group("SinkSpec")))


def test_stores_that_wait_are_refused_beside_kvcached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVOFFLOAD_ALLOW_UNVERIFIED", "1")
    for store in ("auto", "eager"):
        monkeypatch.setenv("KVOFFLOAD_STORE", store)
        check_eligible(config(), elastic())
    monkeypatch.setenv("KVOFFLOAD_STORE", "lazy")
    with pytest.raises(TierRefused, match="KVOFFLOAD_STORE=auto or eager, .* found lazy"):
        check_eligible(config(), elastic())


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Checks an engine beside the kvcached that was run, on a release and a device that were."""
    monkeypatch.setattr(kvcached, "unknown", lambda pool: iter(()))
    monkeypatch.setattr(eligibility, "release_in_use", lambda: "0.26.0")

    def check(*groups: Any, **changes: Any) -> None:
        vllm_config = config(device="cuda")
        vars(vllm_config).update(changes)
        check_eligible(vllm_config, elastic(*groups))

    return check


BESIDE_KVCACHED = {
    "sleep": (
        (), {"model_config": SimpleNamespace(is_encoder_decoder=False, enable_sleep_mode=True)},
        "no sleep mode",
    ),
    "drafts": ((), {"speculative_config": object()}, "no speculative_config"),
    "a connector": (
        (), {"kv_transfer_config": transfers("NixlConnector")}, "no kv_transfer_config",
    ),
    "two groups": (
        (group(), group("SlidingWindowSpec")), {},
        "full attention, found 2 with .*SlidingWindowSpec",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BESIDE_KVCACHED)
def test_beside_kvcached_what_was_not_run_is_refused(
    what: str,
    shown: Callable[..., None],
    told: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups, changes, said = BESIDE_KVCACHED[what]
    shown()
    with pytest.raises(TierRefused, match=said) as refusal:
        shown(*groups, **changes)
    told(refusal, "0.26.0")
    monkeypatch.setenv("KVOFFLOAD_ALLOW_UNVERIFIED", "1")
    shown(*groups, **changes)


def test_beside_a_kvcached_that_was_not_read_it_is_refused(
    shown: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvcached, "unknown", lambda pool: iter(["expected kvcached 1, found 2"]))
    with pytest.raises(TierRefused, match=r"expected kvcached 1, found 2 \(KVOFFLOAD_ALLOW_UNV"):
        shown()


@pytest.mark.parametrize("kind", sorted(KNOWN_SPECS))
def test_known_specs_are_approved(kind: str) -> None:
    uniform = spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": spec(kind), "b": spec(kind)})
    vllm_config = config(decode_context_parallel_size=1, prefill_context_parallel_size=1)
    groups = (group(kind), SimpleNamespace(kv_cache_spec=uniform), group(prefix_replay_tokens=0))
    check_eligible(vllm_config, scheduler(*groups, enable_partial_hash_hits=False))


@pytest.mark.parametrize("kind", ["FullAttentionSpec", "MLAAttentionSpec"])
def test_blocks_of_which_each_rank_has_a_part_are_approved(kind: str) -> None:
    uniform = spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": spec(kind), "b": spec(kind)})
    for one in (group(kind), SimpleNamespace(kv_cache_spec=uniform)):
        check_eligible(config(decode_context_parallel_size=2), scheduler(one))


def test_states_beside_attention_of_which_ranks_have_parts_can_be_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From 0.30 on: before, vLLM counts a state's block as one that ranks divide, too."""
    monkeypatch.setenv("KVOFFLOAD_ALLOW_UNVERIFIED", "1")
    doubts = check_eligible(config(decode_context_parallel_size=2), states())
    assert any("found 2 with FullAttentionSpec, MambaSpec; leave out" in d for d in doubts)
    monkeypatch.setattr(eligibility, "older_than", lambda release: release == "0.30")
    with pytest.raises(TierRefused, match="found 2 with FullAttentionSpec, MambaSpec; leave"):
        check_eligible(config(decode_context_parallel_size=2), states())


def test_what_nobody_has_run_can_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVOFFLOAD_ALLOW_UNVERIFIED", "1")
    (doubt,) = check_eligible(config(prefill_context_parallel_size=4), scheduler())
    assert doubt.startswith("expected prefill_context_parallel_size 1") and "found 4" in doubt


def test_hits_within_a_block_are_taken_where_they_were_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(eligibility, "release_in_use", lambda: "0.32.0")
    assert check_eligible(config(), parts()) == ()
    assert check_eligible(config(device="cuda"), parts()) == ()
    another = parts(mamba_type=SimpleNamespace(name="SHORT_CONV"))
    assert check_eligible(config(), another) == ()
    with pytest.raises(TierRefused, match="delta nets where hits end .* GPU, found SHORT_CONV"):
        check_eligible(config(device="cuda"), another)


def test_prompts_that_ranks_divide_are_taken_where_they_were_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(eligibility, "release_in_use", lambda: "0.26.0")
    of_gpus = config(device="cuda", prefill_context_parallel_size=2)
    assert check_eligible(of_gpus, scheduler(group("MLAAttentionSpec"))) == ()
    with pytest.raises(TierRefused, match="found 2 with 0.26.0 on cpu"):
        check_eligible(config(prefill_context_parallel_size=2), scheduler())
    of_gpus.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(TierRefused, match="expected decode_context_parallel_size 1 beside pref"):
        check_eligible(of_gpus, scheduler(group("MLAAttentionSpec")))


@pytest.mark.parametrize(
    ("connectors", "found"),
    [
        (transfers("OffloadingConnector"), "OffloadingConnector"),  # from 0.11.0 on
        (transfers("SimpleCPUOffloadConnector"), "SimpleCPUOffloadConnector"),  # from 0.19 on
        (transfers("UMBPStoreConnector"), "UMBPStoreConnector"),  # from 0.33 on
        (transfers("MultiConnector", NIXL, OFFLOADING), "OffloadingConnector"),
        (transfers("MultiConnector", SIMPLE, NIXL), "SimpleCPUOffloadConnector"),
        (
            transfers("MultiConnector", NIXL, {
                "kv_connector": "MultiConnector", "kv_role": "kv_both",
                "kv_connector_extra_config": {"connectors": [NIXL, SIMPLE]},
            }),
            "SimpleCPUOffloadConnector",
        ),
    ],
)  # fmt: skip
def test_vllms_own_offloading_connectors_can_be_tried(
    monkeypatch: pytest.MonkeyPatch, connectors: Any, found: str
) -> None:
    with pytest.raises(TierRefused, match=f" found {found} in --kv-transfer-config, "):
        check_eligible(config(connectors=connectors), scheduler(connector=object()))
    monkeypatch.setenv("KVOFFLOAD_ALLOW_UNVERIFIED", "1")
    (doubt,) = check_eligible(config(connectors=connectors), scheduler(connector=object()))
    assert f" found {found} in --kv-transfer-config, " in doubt
    with pytest.raises(TierRefused, match="found --kv-offloading-size as well"):
        check_eligible(config(connectors=connectors, offloading=4.0), scheduler())


@pytest.mark.parametrize(
    "connectors",
    [
        None, transfers(None), transfers("NixlConnector"), transfers("MultiConnector", NIXL),
        transfers("MultiConnector", NIXL, {"kv_role": "kv_both"}),
        # Only a MultiConnector has others within it.
        transfers("NixlConnector", OFFLOADING),
    ],
)  # fmt: skip
def test_other_connectors_are_approved(connectors: Any) -> None:
    assert check_eligible(config(connectors=connectors), scheduler(connector=object())) == ()


def test_vllms_connectors_and_their_configuration_have_these_names() -> None:
    """Of the installed release; the table has the fields for every release."""
    vllm_config = pytest.importorskip("vllm.config")
    factory = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.factory")
    known = factory.KVConnectorFactory._registry
    assert "MultiConnector" in known
    since = {"OffloadingConnector": "0.11.0", "SimpleCPUOffloadConnector": "0.19.0"}
    assert {*since, "UMBPStoreConnector"} == _OFFLOADERS
    for name, release in since.items():
        assert (name in known) == (not older_than(release)), name
    asked = vllm_config.KVTransferConfig(**OFFLOADING)
    assert asked.kv_connector_extra_config == {}
    with pytest.raises(TierRefused, match="found OffloadingConnector in"):
        check_eligible(config(connectors=asked), scheduler())
    several = {"connectors": [NIXL, SIMPLE]}
    asked = vllm_config.KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=several
    )
    with pytest.raises(TierRefused, match="found SimpleCPUOffloadConnector in"):
        check_eligible(config(connectors=asked), scheduler())


def test_every_connector_of_vllm_is_on_the_page_that_says_what_the_tier_does_beside_it() -> None:
    """A release that has another one is read before it is taken: how it reads and fills blocks."""
    factory = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.factory")
    of_class = re.compile(r"^class (\w+Connector(?:V1)?)\(KVConnectorBase_V1\b", re.MULTILINE)
    files = (Path(factory.__file__).parent / "v1").rglob("*.py")  # its list leaves one out
    defined = {name for file in files for name in of_class.findall(file.read_text())}
    known = {*factory.KVConnectorFactory._registry, *defined} - {"NixlBaseConnector"}
    assert len(known) > 4
    told = set(re.findall(r"\w+", (ROOT / "docs/neighbours.md").read_text()))
    assert (known | _OFFLOADERS) - told == set()


@pytest.mark.parametrize("release", ["0.31.0", "0.32.0", "0.33.0"])
@pytest.mark.parametrize("kind", ["GDN_ATTN", "SHORT_CONV", "MAMBA2"])
@pytest.mark.parametrize("checkpoints", [0, 1])
def test_states_are_approved_where_they_were_shown(
    monkeypatch: pytest.MonkeyPatch, release: str, kind: str, checkpoints: int
) -> None:
    monkeypatch.setenv("KVOFFLOAD_VLLM_VERSION", release)
    asked = states(mamba_type=SimpleNamespace(name=kind), num_prefill_checkpoint_blocks=checkpoints)
    if kind in STATES_SHOWN.get((release, "cpu"), ()):
        assert check_eligible(config(), asked) == ()
    else:
        with pytest.raises(
            TierRefused, match=f"{kind} states .* come back on cpu .*found {release}"
        ):
            check_eligible(config(), asked)
    monkeypatch.setenv("KVOFFLOAD_ALLOW_UNVERIFIED", "1")
    doubt, *_ = check_eligible(config(device="xpu"), asked)
    assert "KV cache group 1: expected a release with which " in doubt
    assert f"{kind} states were shown to come back on xpu (none), found {release}" in doubt


ON_CUDA = ("GDN_ATTN", "LINEAR", "MAMBA1", "MAMBA2", "SHORT_CONV")
PLAYED_ON_CUDA = dict.fromkeys(
    ("0.26.0", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"), ON_CUDA
) | dict.fromkeys(("0.23.0", "0.25.1"), ("GDN_ATTN", "MAMBA1", "MAMBA2", "SHORT_CONV"))


@pytest.mark.parametrize("kind", [*ON_CUDA, "CUSTOM"])
@pytest.mark.parametrize("release", ["0.24.0", "0.27.0", *PLAYED_ON_CUDA])
def test_states_are_approved_on_a_gpu_where_they_were_played(
    monkeypatch: pytest.MonkeyPatch, release: str, kind: str
) -> None:
    """Not on its neighbours: of what vLLM does with states no digest is kept."""
    monkeypatch.setenv("KVOFFLOAD_VLLM_VERSION", release)
    asked = states(mamba_type=SimpleNamespace(name=kind))
    if kind in PLAYED_ON_CUDA.get(release, ()):
        assert check_eligible(config(device="cuda"), asked) == ()
        assert check_eligible(config(device="cuda", tensor_parallel_size=2), asked) == ()
    else:
        with pytest.raises(
            TierRefused, match=f"{kind} states .* come back on cuda .*found {release}"
        ):
            check_eligible(config(device="cuda"), asked)


@pytest.mark.parametrize("kind", ON_CUDA)
def test_states_that_a_step_leaves_within_it_were_played_on_a_gpu_of_mamba_2_alone(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("KVOFFLOAD_VLLM_VERSION", "0.33.0")
    asked = states(mamba_type=SimpleNamespace(name=kind), num_prefill_checkpoint_blocks=1)
    assert check_eligible(config(), asked) == ()
    if kind == "MAMBA2":
        assert check_eligible(config(device="cuda"), asked) == ()
    else:
        with pytest.raises(TierRefused, match=f"expected {kind} states .* at its end on a GPU"):
            check_eligible(config(device="cuda"), asked)


UNPLAYED = {
    "drafts": (config(device="cuda"), states(num_speculative_blocks=1), "beside speculative deco"),
    "stages": (
        config(device="cuda", pipeline_parallel_size=2),
        states(mamba_type=SimpleNamespace(name="MAMBA1")),
        "one pipeline stage .* found 2 with MAMBA1",
    ),
    "a connector": (
        config(device="cuda"),
        scheduler(group(), group("MambaSpec", **STATE), connector=object()),
        "no KV connector beside states on a GPU, .* found one with GDN_ATTN and 0.26.0",
    ),
    "delta attention, by model": (
        config(device="cuda", architectures=["AliceAIForCausalLM"]), states(),
        "another kind than delta attention, found those of AliceAIForCausalLM",
    ),
    "delta attention, beside MLA": (
        config(device="cuda"),
        scheduler(group("MLAAttentionSpec"), group("MambaSpec", **STATE)),
        "beside plain attention on a GPU, found MLA",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", UNPLAYED)
def test_what_was_not_played_with_states_on_a_gpu_is_refused_and_can_be_tried(
    monkeypatch: pytest.MonkeyPatch, told: Callable[..., None], what: str
) -> None:
    monkeypatch.setenv("KVOFFLOAD_VLLM_VERSION", "0.26.0")
    vllm_config, asked, found = UNPLAYED[what]
    with pytest.raises(TierRefused, match=f"KV cache group 1: .*{found}") as refusal:
        check_eligible(vllm_config, asked)
    told(refusal, "0.26.0")
    assert str(refusal.value).count("KVOFFLOAD_ALLOW_UNVERIFIED=1 tries it") == 1
    monkeypatch.setenv("KVOFFLOAD_ALLOW_UNVERIFIED", "1")
    (doubt,) = check_eligible(vllm_config, asked)
    assert re.search(found, doubt)


def test_delta_attention_is_refused_on_the_cpu_as_well() -> None:
    with pytest.raises(TierRefused, match="group 1: .* found those of AliceAIForCausalLM"):
        check_eligible(config(architectures=["AliceAIForCausalLM"]), states())


QWEN3_5 = [
    f"Qwen3_5{experts}For{what}"
    for experts in ("", "Moe")
    for what in ("CausalLM", "ConditionalGeneration")
]


@pytest.mark.parametrize("model", QWEN3_5)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_qwen3_5_is_taken_as_the_states_of_qwen3_next_are(
    monkeypatch: pytest.MonkeyPatch, device: str, model: str
) -> None:
    """On a GPU, too, where Qwen3-Next alone was played: the kind of state decides."""
    asked = config(device=device, architectures=[model])
    for release in {release for release, on in STATES_SHOWN if on == device}:
        monkeypatch.setenv("KVOFFLOAD_VLLM_VERSION", release)
        assert check_eligible(asked, states()) == ()
        if "GDN_ATTN" in STATES_OF_DRAFTS_SHOWN.get((release, device), ()):
            assert check_eligible(asked, states(num_speculative_blocks=1)) == ()


def test_qwen3_5_has_the_layers_of_qwen3_next_that_keep_a_state() -> None:
    made = re.compile(r"self\.linear_attn = (\w+)\(")
    for _, folder in sources():
        files = [folder / f"model_executor/models/{name}.py" for name in ("qwen3_next", "qwen3_5")]
        next_one, this = (made.findall(file.read_text()) for file in files)
        assert next_one == this and len(this) == 1
        return
    pytest.skip("no vLLM")


def test_who_has_states_at_every_block_that_were_not_shown_is_told_what_to_start_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mode all is the default of Mamba 1 and 2 up to 0.27."""
    remedy = "(or start with --mamba-cache-mode align)"
    for release, kind, told in (("0.31.0", "GDN_ATTN", True), ("0.19.1", "MAMBA2", False)):
        monkeypatch.setenv("KVOFFLOAD_VLLM_VERSION", release)
        asked = states(mamba_cache_mode="all", mamba_type=SimpleNamespace(name=kind))
        with pytest.raises(TierRefused, match=f"{kind} states at every block") as refusal:
            check_eligible(config(device="cuda"), asked)
        assert (remedy in str(refusal.value)) == told
        assert "KVOFFLOAD_ALLOW_UNVERIFIED=1 tries it" in str(refusal.value)


@pytest.mark.parametrize(("release", "device"), STATES_AT_EVERY_BLOCK_SHOWN)
def test_states_at_every_block_are_approved_where_they_were_shown(
    monkeypatch: pytest.MonkeyPatch, release: str, device: str
) -> None:
    monkeypatch.setenv("KVOFFLOAD_VLLM_VERSION", release)
    for kind in ON_CUDA:
        asked = states(mamba_cache_mode="all", mamba_type=SimpleNamespace(name=kind))
        if kind in STATES_AT_EVERY_BLOCK_SHOWN[release, device]:
            assert check_eligible(config(device=device), asked) == ()
        else:
            with pytest.raises(TierRefused, match=f"{kind} states at every block"):
                check_eligible(config(device=device), asked)


SOURCES = Path(os.environ.get("RELEASE_SOURCES") or ROOT / ".vllm-sources")
# Kinds of KV cache specs that are refused, and why.
REFUSED_SPECS = {
    "CrossAttentionSpec": "encoder-decoder models, of which vLLM caches no prefix",
    "EncoderOnlyAttentionSpec": "keeps no KV, and is in no group of a scheduler",
    "HiSparseHotSpec": "kept elsewhere, with a copy on the host",
    "HiSparseResidentSpec": "kept elsewhere, with a copy on the host",
    "KpoolTailSpec": "of 0.30 and 0.31, beside delta attention alone",
    "RSWASpec": "of one model, for which vLLM turns prefix caching off",
    "SinkFullAttentionSpec": "of a model whose sinks are in blocks of no request; not run",
}


def sources(*releases: str) -> Iterator[tuple[str, Path]]:
    """Folders of vLLM: the installed one, and those of the releases that were fetched."""
    if installed := find_spec("vllm"):
        yield "installed", Path(str(installed.origin)).parent
    for release in releases:
        if (SOURCES / release).is_dir():
            yield release, SOURCES / release / "vllm"


def test_every_kind_of_spec_that_vllm_has_is_decided() -> None:
    """A new one is read before it is taken or refused: what its blocks hold, and who writes it."""
    taken = {*KNOWN_SPECS, *UNCACHED_SPECS, STATE_SPEC}
    assert taken.isdisjoint(REFUSED_SPECS)
    of_class = re.compile(r"^class (\w+Spec)\(\w+\):", re.MULTILINE)
    seen = {}
    for release, folder in sources(*RELEASES):
        text = (folder / "v1/kv_cache_interface.py").read_text()
        seen[release] = set(of_class.findall(text)) - {"AttentionSpec", "KVCacheSpec"}
        assert seen[release] <= {*taken, *REFUSED_SPECS}, release
    if not seen:
        pytest.skip("no vLLM")
    if set(RELEASES) <= set(seen):
        assert set().union(*seen.values()) == {*taken, *REFUSED_SPECS}, "there is no such kind"


def test_delta_attention_is_beside_mla_or_its_model_is_named() -> None:
    """Its states have the name of gated delta nets, whose models were played."""
    made = re.compile(r"= (?:Bailing\w+|Glm5\w+|Kimi\w+)(?:Delta\w*|Linear)Attention\(")
    of_class = re.compile(r"^class (\w+ForCausalLM)\(", re.MULTILINE)
    for release, folder in sources(*{release for release, _ in STATES_SHOWN}):
        files = [*folder.glob("model_executor/models/*.py"), *folder.glob("models/**/*.py")]
        assert files
        for text in (file.read_text() for file in files):
            if made.search(text) and "MLA" not in text:
                assert set(of_class.findall(text)) <= set(DELTA_ATTENTION), release


def test_linear_attention_was_played_on_a_gpu_beside_mla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVOFFLOAD_VLLM_VERSION", "0.26.0")
    linear = {**STATE, "mamba_type": SimpleNamespace(name="LINEAR")}
    asked = scheduler(group("MLAAttentionSpec"), group("MambaSpec", **linear))
    assert check_eligible(config(device="cuda"), asked) == ()


def test_states_are_approved_beside_drafts_where_they_were_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVOFFLOAD_VLLM_VERSION", "0.32.0")
    drafting = states(num_speculative_blocks=2)
    assert check_eligible(config(), drafting) == ()
    assert check_eligible(config(device="cuda"), drafting) == ()
    drafting.use_v2_model_runner = True
    assert check_eligible(config(), drafting) == ()
    monkeypatch.setenv("KVOFFLOAD_VLLM_VERSION", "0.33.0")
    with pytest.raises(TierRefused, match="runner V1 beside states of drafted tokens .* found V2"):
        check_eligible(config(), drafting)
    assert check_eligible(config(device="cuda"), drafting) == ()
    drafting.use_v2_model_runner = False
    assert check_eligible(config(), drafting) == ()
    assert check_eligible(config(device="cuda"), drafting) == ()
    monkeypatch.setenv("KVOFFLOAD_VLLM_VERSION", "0.30.0")
    assert check_eligible(config(), states()) == ()
    with pytest.raises(
        TierRefused, match="beside speculative decoding .* on cpu .0.32.0, 0.33.0., found 0.30.0"
    ):
        check_eligible(config(), drafting)
    monkeypatch.setenv("KVOFFLOAD_VLLM_VERSION", "0.26.0")
    with pytest.raises(TierRefused, match="beside speculative decoding .* on cuda .* found 0.26.0"):
        check_eligible(config(device="cuda"), drafting)


def test_states_that_a_step_leaves_at_its_end_have_any_keys() -> None:
    """Those within a step are wrong beside keys with two tokens behind a block."""
    within = states(num_prefill_checkpoint_blocks=1)
    for ahead, asked in ((2, states()), (1, within), (0, within)):
        assert check_eligible(config(num_hash_lookahead_tokens=ahead), asked) == ()


def test_states_are_approved_beside_a_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVOFFLOAD_VLLM_VERSION", "0.32.0")
    asked = scheduler(group(), group("MambaSpec", **STATE), connector=object())
    assert check_eligible(config(), asked) == ()


def test_every_release_whose_states_were_shown_has_results_of_them() -> None:
    """On each one a row of docs/features.md is green for each kind."""
    kinds = {
        "GDN_ATTN": "gated delta net (Qwen3-Next)", "SHORT_CONV": "short convolutions",
        "MAMBA2": "Mamba 2", "MAMBA1": "Mamba 1", "LINEAR": "linear attention",
    }  # fmt: skip
    for (release, device), shown in STATES_SHOWN.items():
        for kind in shown:
            (row,) = [row for row in ROWS if row.name.startswith(f"states: {kinds[kind]}")]
            if device == "cuda":
                _must_be_green_on_a_gpu(row, release)
                continue
            tests = features.results_of(release)[row.name]["tests"]
            refused = [test for test in tests if "refusal" in test]
            assert {test["outcome"] for test in tests} == {"passed"} and not refused, (release, row)


def test_every_release_whose_states_were_shown_at_every_block_has_results_of_them() -> None:
    """With runner V1, which alone has them."""
    (row,) = [row for row in ROWS if row.name.startswith("states at every block (mode all")]
    for (release, device), shown in STATES_AT_EVERY_BLOCK_SHOWN.items():
        assert (device, shown) == ("cuda", ("MAMBA1", "MAMBA2")), "the row has no others"
        _must_be_green_on_a_gpu(row, release, "(V1)")


def test_every_release_whose_states_were_shown_on_stages_has_results_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (row,) = [row for row in ROWS if row.name == "states on two pipeline stages"]
    asked = config(device="cuda", pipeline_parallel_size=2)
    for release, shown in STATES_ON_STAGES_SHOWN.items():
        _must_be_green_on_a_gpu(row, release)
        assert shown == ("GDN_ATTN",), "the row has no other kind"
        monkeypatch.setenv("KVOFFLOAD_VLLM_VERSION", release)
        assert check_eligible(asked, states()) == ()
        with pytest.raises(TierRefused, match="one pipeline stage .* found 2 with MAMBA1 and"):
            check_eligible(asked, states(mamba_type=SimpleNamespace(name="MAMBA1")))


def test_every_release_whose_states_were_shown_beside_a_connector_has_results_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {"GDN_ATTN": "gated delta net", "MAMBA2": "Mamba 2", "MAMBA1": "Mamba 1"}
    for release, shown in STATES_BESIDE_A_CONNECTOR_SHOWN.items():
        played = {f"states beside a KV connector: {names[kind]}" for kind in shown}
        _must_have_passed(release, played, ("v1", "v2"))
        monkeypatch.setenv("KVOFFLOAD_VLLM_VERSION", release)
        for kind, refused in ((kind, kind not in shown) for kind in names):
            one = group("MambaSpec", **{**STATE, "mamba_type": SimpleNamespace(name=kind)})
            asked = scheduler(group(), one, connector=object())
            with pytest.raises(TierRefused, match=kind) if refused else nullcontext():
                assert check_eligible(config(device="cuda"), asked) == ()


def test_what_was_shown_beside_states_on_a_gpu_has_results_there() -> None:
    beside = {
        "states with speculative decoding": STATES_OF_DRAFTS_SHOWN,
        "hits that end within a block (--prefix-match-unit)": _PARTS_SHOWN,
    }
    for name, shown in beside.items():
        (row,) = [row for row in ROWS if row.name == name]
        releases = [release for release, device in shown if device == "cuda"]
        assert releases, name
        for release in releases:
            _must_be_green_on_a_gpu(row, release)


def test_mamba_2_was_played_beside_drafts_with_runner_v1(monkeypatch: pytest.MonkeyPatch) -> None:
    """With V2 it is refused: vLLM's n-grams, which the model of the tests has, need V1."""
    kind = {**STATE, "mamba_type": SimpleNamespace(name="MAMBA2"), "num_speculative_blocks": 2}
    shown = [on for on, kinds in STATES_OF_DRAFTS_SHOWN.items() if "MAMBA2" in kinds]
    assert {device for _, device in shown} == {"cuda"}
    for release, _ in shown:
        _must_have_passed(release, {"states with n-grams: Mamba 2"}, ("v1",))
        monkeypatch.setenv("KVOFFLOAD_VLLM_VERSION", release)
        for v2 in (False, True):
            asked = scheduler(group(), group("MambaSpec", **kind))
            asked.use_v2_model_runner = v2
            with pytest.raises(TierRefused, match="found V2, with") if v2 else nullcontext():
                assert check_eligible(config(device="cuda"), asked) == ()


def _must_have_passed(release: str, kinds: set[str], runners: tuple[str, ...]) -> None:
    (on_it,) = [one for one in features_gpu.load() if one["release"] == release]
    passed = {test["name"] for test in on_it["tests"] if test["outcome"] == "passed"}
    wanted = {f"{runner}, {kind}" for runner in runners for kind in kinds}
    assert wanted <= passed, (release, wanted - passed)


def test_every_release_with_which_ranks_divided_a_prompt_has_results_of_it() -> None:
    """Some have it with runner V2 alone."""
    (row,) = [row for row in ROWS if row.name.startswith("prefill context parallelism (PCP)")]
    assert {device for _, device in _PREFILL_SHOWN} == {"cuda"}
    for release, _ in _PREFILL_SHOWN:
        _must_be_green_on_a_gpu(row, release, "V2)")


def test_the_table_of_states_in_the_documents_is_the_one_that_decides() -> None:
    kinds = {
        "gated delta nets (Qwen3-Next)": ("GDN_ATTN",),
        "Mamba 1 (Jamba)": ("MAMBA1", "MAMBA2", "SHORT_CONV"),
        "linear attention (Bailing)": ("LINEAR",),
        "gated delta nets with speculative decoding": ("GDN_ATTN",),
        "Mamba 1 and Mamba 2 [at every block]": ("MAMBA1", "MAMBA2"),
    }
    of_way = {"speculative": STATES_OF_DRAFTS_SHOWN, "every block": STATES_AT_EVERY_BLOCK_SHOWN}
    lines = (ROOT / "docs/shapes.md").read_text().splitlines()
    for begin, of_row in kinds.items():
        (line,) = [line for line in lines if line.startswith(f"| {begin}")]
        shown = next((one for way, one in of_way.items() if way in begin), STATES_SHOWN)
        for device, cell in zip(("cpu", "cuda"), line.split("|")[2:]):
            for kind in of_row:
                taken = {
                    on for (on, where), some in shown.items() if where == device and kind in some
                }
                known = {on for on, _ in (*STATES_SHOWN, *shown)}
                assert _releases_in(cell, known) == taken, (kind, device)


def _releases_in(text: str, known: set[str]) -> set[str]:
    """Those that a text names, ranges included."""
    found = set()
    for first, last in re.findall(r"(0\.\d+\.\d+)(?: to (0\.\d+\.\d+))?", text):
        found |= {one for one in known if first <= one <= (last or first)}
    return found


def _must_be_green_on_a_gpu(row: Any, release: str, runners: str = "(V1, V2)") -> None:
    on_it = [one for one in features_gpu.load() if one["release"] == release]
    (line,) = features_gpu.lines(row, on_it)
    lacks = "Model Runner V2 does not yet support"
    v2 = [t for t in on_it[0]["tests"] if t["name"] in {f"v2, {kind}" for kind in row.gpu}]
    if v2 and all(lacks in test.get("why", "") for test in v2):
        runners = "(V1)"
    assert line.verdict.startswith("green"), (release, row)
    assert runners in line.what, "one of the runners was not played"


@pytest.mark.parametrize(
    ("changes", "found"),
    [({"pipeline_parallel_size": 2}, "one pipeline stage"), ({"async_scheduling": True}, "synch")],
)
def test_steps_without_tokens_that_stay_in_the_queue_are_refused_up_to_0_10_1(
    monkeypatch: pytest.MonkeyPatch, changes: dict, found: str
) -> None:
    monkeypatch.setenv("KVOFFLOAD_VLLM_VERSION", "0.10.2")
    check_eligible(config(**changes), scheduler())
    monkeypatch.setenv("KVOFFLOAD_VLLM_VERSION", "0.10.1.1")
    check_eligible(config(), scheduler())
    with pytest.raises(TierRefused, match=f"expected {found}.*before vLLM 0.10.2, found"):
        check_eligible(config(**changes), scheduler())


@pytest.mark.parametrize("strict", ["1", "0"])
def test_the_engine_before_v1_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, strict: str
) -> None:
    monkeypatch.setenv("KVOFFLOAD_STRICT", strict)
    started: list[str] = []
    engine = type("LLMEngine", (), {"__module__": "vllm.engine.llm_engine"})
    derived = type("_AsyncLLMEngine", (engine,), {"__module__": "vllm.engine.async_llm_engine"})()
    if strict == "1":
        with pytest.raises(TierRefused, match="expected vLLM's V1 engine, found V0"):
            init_v0(lambda: started.append("engine"), derived, (), {})
        assert not started
    else:
        with caplog.at_level(logging.ERROR):
            init_v0(lambda: started.append("engine"), derived, (), {})
        assert started == ["engine"] and "set VLLM_USE_V1=1" in caplog.text


def test_v1s_engine_under_the_older_name_is_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVOFFLOAD_STRICT", "1")
    started: list[str] = []
    engine = type("LLMEngine", (), {"__module__": "vllm.v1.engine.llm_engine"})()
    init_v0(lambda: started.append("engine"), engine, (), {})
    assert started == ["engine"]
