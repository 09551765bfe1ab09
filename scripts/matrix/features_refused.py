"""Whether the tier refuses by default what kinds of engines were played with on a GPU.

Kinds with states, and with prompts that ranks divide, are played with KVOFFLOAD_ALLOW_UNVERIFIED=1
(`tests/engine/gpu_kinds.py`), so that they run where nobody has run them before. The package's own
check says which of them start without it: it is given what it reads of such an engine. No release
or kind of states is named here as taken or refused.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from kvoffload_patch.integration.engine.eligibility import check_eligible
from kvoffload_patch.integration.errors import TierRefused

# What vLLM calls the states of each kind.
TYPES = {
    "gated delta net": "GDN_ATTN",
    "short convolutions": "SHORT_CONV",
    "Mamba 1": "MAMBA1",
    "Mamba 2": "MAMBA2",
    "linear attention": "LINEAR",
}
# What vLLM is started with, by the first words of a kind's name.
_WAYS: dict[str, dict[str, Any]] = {
    "states": {},
    "states on two ranks": {"tensor_parallel_size": 2},
    "states on two ranks with a part of each block": {
        "tensor_parallel_size": 2,
        "decode_context_parallel_size": 2,
    },
    "states on two stages": {"pipeline_parallel_size": 2},
    "states at every block": {"mamba_cache_mode": "all"},
    "states with drafts": {"speculative_config": {"num_speculative_tokens": 2}},
    "states with n-grams": {"speculative_config": {"num_speculative_tokens": 3}},
    "states with hits within a block": {"prefix_match_unit": 16},
    "states beside a KV connector": {"kv_transfer_config": {"kv_connector": "StateConnector"}},
}
# The same of kinds without states, by their whole names.
_DIVIDED: dict[str, dict[str, Any]] = {
    f"mla, {ranks} that divide a prompt": {"prefill_context_parallel_size": 2, **more}
    for ranks, more in {
        "two ranks": {},
        "four ranks": {"prefill_context_parallel_size": 4},
        "two pairs": {"tensor_parallel_size": 2},
    }.items()
}


def arguments(kind: str) -> dict[str, Any] | None:
    """What vLLM is started with where a kind is played unverified; None where it is not."""
    way, _, of = kind.partition(": ")
    return _WAYS.get(way) if of in TYPES else _DIVIDED.get(kind)


def is_refused(name: str, release: str) -> bool:
    """Whether what was played is refused without KVOFFLOAD_ALLOW_UNVERIFIED.

    Args:
        name: of a test of `scripts/matrix gpu`: a model runner and a kind.
        release: vLLM's.
    """
    runner, _, kind = name.partition(", ")
    asked = arguments(kind)
    if asked is None:
        return False
    with _by_default_on(release):
        try:
            check_eligible(_configuration(asked), _scheduler(runner, kind, asked))
        except TierRefused:
            return True
    return False


@contextlib.contextmanager
def _by_default_on(release: str) -> Iterator[None]:
    """The package's settings are the default ones but for the release that it takes for vLLM's."""
    before = {name: text for name, text in os.environ.items() if name.startswith("KVOFFLOAD_")}
    for name in before:
        del os.environ[name]
    os.environ["KVOFFLOAD_VLLM_VERSION"] = release
    try:
        yield
    finally:
        del os.environ["KVOFFLOAD_VLLM_VERSION"]
        os.environ.update(before)


def _configuration(asked: dict[str, Any]) -> SimpleNamespace:
    """What the check reads of vLLM's configuration."""
    parallel = {"pipeline_parallel_size": 1, **{n: v for n, v in asked.items() if "parallel" in n}}
    return SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        parallel_config=SimpleNamespace(**parallel),
        scheduler_config=SimpleNamespace(async_scheduling=True),
        model_config=SimpleNamespace(is_encoder_decoder=False, architectures=[]),
        device_config=SimpleNamespace(device_type="cuda"),
        speculative_config=asked.get("speculative_config"),
        kv_transfer_config=_named(asked.get("kv_transfer_config")),
    )


def _named(asked: dict[str, str] | None) -> SimpleNamespace | None:
    """A connector's configuration, which names it."""
    return SimpleNamespace(kv_connector_extra_config={}, **asked) if asked else None


def _scheduler(runner: str, kind: str, asked: dict[str, Any]) -> SimpleNamespace:
    """What it reads of a scheduler: the groups, and how long hits are."""
    of = TYPES.get(kind.partition(": ")[2], "")
    latent = not of or of == "LINEAR"  # linear attention is played beside MLA
    groups = [_spec("MLAAttentionSpec" if latent else "FullAttentionSpec")]
    if of:
        drafted = (asked.get("speculative_config") or {}).get("num_speculative_tokens", 0)
        state = _spec(
            "MambaSpec",
            mamba_type=SimpleNamespace(name=of),
            mamba_cache_mode=asked.get("mamba_cache_mode", "align"),
            num_speculative_blocks=drafted,
        )
        groups.append(state)
    parts = "prefix_match_unit" in asked
    return SimpleNamespace(
        use_v2_model_runner=runner == "v2",
        connector=asked.get("kv_transfer_config"),
        kv_cache_manager=SimpleNamespace(
            coordinator=SimpleNamespace(enable_partial_hash_hits=parts),
            block_pool=SimpleNamespace(),
        ),
        kv_cache_config=SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in groups]
        ),
    )


def _spec(kind: str, **attributes: Any) -> Any:
    """A KV cache spec of a class with this name, by which the check knows it."""
    made = type(kind, (), {})()
    vars(made).update(block_size=128, **attributes)
    return made
