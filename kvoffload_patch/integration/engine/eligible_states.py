"""Whether the states that layers keep come back right: what is refused, and what nobody has run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvoffload_patch.integration.engine.adapters.vllm_groups import (
    at_every_block,
    hits_parts,
    kinds,
    members,
)
from kvoffload_patch.integration.install import release_in_use
from kvoffload_patch.integration.spec_kinds import STATE_SPEC

TRIES = "KVOFFLOAD_ALLOW_UNVERIFIED=1 tries it"
# By release and device, the kinds of states that were shown to come back.
_EVERY = ("GDN_ATTN", "LINEAR", "MAMBA1", "MAMBA2", "SHORT_CONV")
STATES_SHOWN: dict[tuple[str, str], tuple[str, ...]] = {
    ("0.23.0", "cuda"): ("GDN_ATTN", "MAMBA1", "MAMBA2", "SHORT_CONV"),
    ("0.25.1", "cuda"): ("GDN_ATTN", "MAMBA1", "MAMBA2", "SHORT_CONV"),
    ("0.26.0", "cuda"): _EVERY,
    ("0.28.0", "cuda"): _EVERY,
    ("0.29.0", "cuda"): _EVERY,
    ("0.30.0", "cpu"): ("GDN_ATTN", "LINEAR"),
    ("0.30.0", "cuda"): _EVERY,
    ("0.31.0", "cpu"): ("GDN_ATTN", "LINEAR"),
    ("0.31.0", "cuda"): _EVERY,
    ("0.32.0", "cpu"): _EVERY,
    ("0.32.0", "cuda"): _EVERY,
    ("0.33.0", "cpu"): _EVERY,
    ("0.33.0", "cuda"): _EVERY,
}
# The same beside speculative decoding, which keeps states of drafted tokens as well.
STATES_OF_DRAFTS_SHOWN: dict[tuple[str, str], tuple[str, ...]] = {
    ("0.28.0", "cuda"): ("GDN_ATTN",),
    ("0.29.0", "cuda"): ("GDN_ATTN",),
    ("0.30.0", "cuda"): ("GDN_ATTN",),
    ("0.31.0", "cuda"): ("GDN_ATTN", "MAMBA2"),
    ("0.32.0", "cpu"): ("GDN_ATTN",),
    ("0.32.0", "cuda"): ("GDN_ATTN", "MAMBA2"),
    ("0.33.0", "cpu"): ("GDN_ATTN",),
    ("0.33.0", "cuda"): ("GDN_ATTN",),
}
# The same in mode all, in which a step leaves one at the end of every block.
STATES_AT_EVERY_BLOCK_SHOWN: dict[tuple[str, str], tuple[str, ...]] = {
    ("0.23.0", "cuda"): ("MAMBA1", "MAMBA2"),
    ("0.25.1", "cuda"): ("MAMBA1", "MAMBA2"),
    ("0.26.0", "cuda"): ("MAMBA1", "MAMBA2"),
    ("0.28.0", "cuda"): ("MAMBA1", "MAMBA2"),
    ("0.29.0", "cuda"): ("MAMBA1", "MAMBA2"),
    ("0.30.0", "cuda"): ("MAMBA1", "MAMBA2"),
    ("0.31.0", "cuda"): ("MAMBA1", "MAMBA2"),
}
# By release, the same as the first on a GPU with several pipeline stages.
STATES_ON_STAGES_SHOWN: dict[str, tuple[str, ...]] = {
    "0.26.0": ("GDN_ATTN",),
    "0.28.0": ("GDN_ATTN",),
}
# And beside a KV connector that brings blocks and states beside the step.
STATES_BESIDE_A_CONNECTOR_SHOWN: dict[str, tuple[str, ...]] = {
    "0.29.0": ("GDN_ATTN",),
    "0.31.0": ("MAMBA2",),
    "0.32.0": ("GDN_ATTN", "MAMBA2"),
}
# Models whose delta attention has the name of gated delta nets and is not beside MLA.
DELTA_ATTENTION = ("AliceAIForCausalLM",)
# Where drafts were shown with model runner V1 alone, and why.
_NOT_RUN = "with which such states were not run"
_DRAFTS_WITH_V1 = {
    ("0.33.0", "cpu", "GDN_ATTN"): "with which plain vLLM does not repeat its answers",
    ("0.31.0", "cuda", "MAMBA2"): _NOT_RUN,
    ("0.32.0", "cuda", "MAMBA2"): _NOT_RUN,
}


def problem(vllm_config: Any, spec: Any) -> str | None:
    """Why the states of a group cannot be kept; None if they can.

    A block is to hold the state behind its last token from the step that computes it until it is
    handed out again, as in vLLM's modes align and all, and nothing besides the block is to be
    needed.
    """
    stages = vllm_config.parallel_config.pipeline_parallel_size
    ahead = getattr(vllm_config, "num_hash_lookahead_tokens", 0)  # from 0.33 on
    for member in members(spec):
        if type(member).__name__ != STATE_SPEC:
            return f"expected states alone, found {type(member).__name__} beside them"
        mode = getattr(member, "mamba_cache_mode", "none")
        drafted = getattr(member, "num_speculative_blocks", 0)
        if mode not in ("align", "all"):
            return f"expected states kept in mode align or all, found mode {mode}"
        if mode == "all" and drafted:
            return "expected states kept in align mode beside drafts, found mode all"
        if stages > 1 and drafted:
            return (
                "expected one pipeline stage beside states of drafted tokens, which other stages "
                f"put in place some steps later, found {stages}"
            )
        if ahead > 1 and leaves_some_within_a_step([member]):
            return (
                "expected keys with one token behind a block at most beside states that a step "
                f"leaves within it, found {ahead}, with which vLLM gives a state a later one's key"
            )
    if getattr(vllm_config.cache_config, "use_replayssm", False):
        return "expected states that are kept in blocks alone, found --use-replayssm"
    return None


def doubts(vllm_config: Any, scheduler: Any, spec: Any) -> Iterator[str]:
    """Why nobody has seen the states of a group come back right where this engine runs."""
    of_layers = members(spec)
    kind = str(getattr(of_layers[0].mamba_type, "name", of_layers[0].mamba_type))
    unshown = _unshown_states(vllm_config, of_layers, kind)
    if unshown:
        yield unshown
    elif _drafted(of_layers) and getattr(scheduler, "use_v2_model_runner", False):
        release, device = release_in_use(), vllm_config.device_config.device_type
        if why := _DRAFTS_WITH_V1.get((release, device, kind)):
            yield (
                f"expected model runner V1 beside states of drafted tokens with {release} on "
                f"{device}, found V2, {why}"
            )
    for model in set(DELTA_ATTENTION).intersection(vllm_config.model_config.architectures or ()):
        yield f"expected states of another kind than delta attention, found those of {model}"
    if vllm_config.device_config.device_type != "cpu":
        yield from _unplayed_on_a_gpu(vllm_config, scheduler, of_layers, kind)


def leaves_some_within_a_step(of_layers: Sequence[Any]) -> bool:
    """Whether a step leaves states of prompts before its end, too, as checkpoints."""
    return any(getattr(one, "num_prefill_checkpoint_blocks", 0) for one in of_layers)


def _unplayed_on_a_gpu(
    vllm_config: Any, scheduler: Any, of_layers: Sequence[Any], kind: str
) -> Iterator[str]:
    """What has not been played with states on a GPU and can come out otherwise than without it.

    Several tensor-parallel ranks are taken: each copies its own tensors, by block numbers that are
    the same on all, whatever a block holds; two were played with two kinds of states.
    """
    stages, release = vllm_config.parallel_config.pipeline_parallel_size, release_in_use()
    if stages > 1 and kind not in STATES_ON_STAGES_SHOWN.get(release, ()):
        yield (
            "expected one pipeline stage beside states on a GPU, or states that were shown with "
            f"several ({_told(STATES_ON_STAGES_SHOWN)}), found {stages} with {kind} and {release}"
        )
    connector = getattr(scheduler, "connector", None) is not None
    if connector and kind not in STATES_BESIDE_A_CONNECTOR_SHOWN.get(release, ()):
        yield (
            "expected no KV connector beside states on a GPU, or states that were shown beside one "
            f"({_told(STATES_BESIDE_A_CONNECTOR_SHOWN)}), found one with {kind} and {release}"
        )
    if kind == "GDN_ATTN" and "MLAAttentionSpec" in kinds(
        scheduler.kv_cache_config.kv_cache_groups
    ):
        yield (
            "expected gated delta nets beside plain attention on a GPU, found MLA, beside which "
            "delta attention (Kimi-Linear) has their name"
        )
    if kind != "GDN_ATTN" and hits_parts(scheduler):
        yield f"expected gated delta nets where hits end within a block on a GPU, found {kind}"
    if kind != "MAMBA2" and leaves_some_within_a_step(of_layers):
        yield (
            f"expected {kind} states that a step leaves at its end on a GPU, found some that it "
            "leaves within, as FlashInfer's kernel for gated delta nets does from 0.33 on "
            """(--additional-config '{"gdn_prefill_backend": "triton"}' chooses another)"""
        )


def _told(shown: dict[str, tuple[str, ...]]) -> str:
    return "; ".join(f"{', '.join(of)} with {release}" for release, of in shown.items())


def _unshown_states(vllm_config: Any, of_layers: Sequence[Any], kind: str) -> str | None:
    """Why nobody has seen such states on this release and device."""
    release, device = release_in_use(), vllm_config.device_config.device_type
    every, known, how = any(map(at_every_block, of_layers)), STATES_SHOWN, ""
    if every:
        known, how = STATES_AT_EVERY_BLOCK_SHOWN, " at every block (mode all)"
    elif _drafted(of_layers):
        known, how = STATES_OF_DRAFTS_SHOWN, " beside speculative decoding"
    if kind in known.get((release, device), ()):
        return None
    shown = [on for (on, where), of in known.items() if where == device and kind in of]
    align = every and kind in STATES_SHOWN.get((release, device), ())
    return (
        f"expected a release with which {kind} states{how} were shown to come back on {device} "
        f"({', '.join(shown) or 'none'}), found {release}"
        + " (or start with --mamba-cache-mode align)"
        * align
    )


def _drafted(of_layers: Sequence[Any]) -> bool:
    return any(one.num_speculative_blocks for one in of_layers)
