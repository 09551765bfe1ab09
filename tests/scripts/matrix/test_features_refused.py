"""A verdict of a GPU says what a start without further settings refuses, by the package's check."""

from __future__ import annotations

import os

import pytest
from engine import gpu_kinds, gpu_states

from kvoffload_patch.integration.engine import eligible_states
from scripts.matrix import features_gpu, features_refused
from scripts.matrix.features_rows import ROWS

# Arguments of `vllm.LLM` that decide whether an engine is taken.
DECIDE = (
    "pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size",
    "mamba_cache_mode", "prefix_match_unit", "kv_transfer_config", "tensor_parallel_size",
)  # fmt: skip
DEFAULTS = {"mamba_cache_mode": "align", **dict.fromkeys(DECIDE[:3] + DECIDE[-1:], 1)}


@pytest.mark.parametrize("kind", gpu_kinds.KINDS, ids=lambda kind: kind.name)
def test_what_is_played_unverified_is_asked_about_as_it_is_played(kind: gpu_kinds.Kind) -> None:
    """A kind that is played as a user would start it has not been refused."""
    said = features_refused.arguments(kind.name)
    if "KVOFFLOAD_ALLOW_UNVERIFIED" not in kind.settings:
        assert said is None
        return
    assert said is not None, "nobody knows whether this is refused by default"
    connector = {"kv_transfer_config": gpu_states.CONNECTOR} if kind.connector else {}
    engine, asked = {**kind.engine, **connector}, said.get("kv_transfer_config", {})
    for name in DECIDE:
        default = DEFAULTS.get(name)
        if name != "kv_transfer_config":
            assert said.get(name, default) == engine.get(name, default), name
    assert asked.get("kv_connector") == connector.get("kv_transfer_config", {}).get("kv_connector")
    drafted, played = (one.get("speculative_config") or {} for one in (said, kind.engine))
    assert drafted.get("num_speculative_tokens") == played.get("num_speculative_tokens")


def test_states_that_were_shown_on_a_release_are_refused_on_another() -> None:
    for release, refused in (("0.26.0", False), ("0.28.0", False), ("0.27.1", True)):
        name = "v2, states on two stages: gated delta net"
        assert features_refused.is_refused(name, release) == refused
    assert features_refused.is_refused("v2, states: Mamba 2", "0.27.1")
    assert not features_refused.is_refused("v2, mla, two ranks that divide a prompt", "0.32.0")
    assert features_refused.is_refused("v2, mla, two ranks that divide a prompt", "0.27.1")
    assert not features_refused.is_refused("v2, graphs", "0.27.1")
    beside = "v1, states beside a KV connector: "
    assert not features_refused.is_refused(f"{beside}gated delta net", "0.32.0")
    assert features_refused.is_refused(f"{beside}Mamba 2", "0.29.0")


def test_the_packages_own_table_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    name, release = "v1, states on two stages: gated delta net", "0.27.1"
    monkeypatch.setitem(eligible_states.STATES_SHOWN, (release, "cuda"), ("GDN_ATTN",))
    assert features_refused.is_refused(name, release)
    monkeypatch.setitem(eligible_states.STATES_ON_STAGES_SHOWN, release, ("GDN_ATTN",))
    assert not features_refused.is_refused(name, release)
    drafts = "v1, states with drafts: gated delta net"
    assert features_refused.is_refused(drafts, release)
    monkeypatch.setitem(eligible_states.STATES_OF_DRAFTS_SHOWN, (release, "cuda"), ("GDN_ATTN",))
    assert not features_refused.is_refused(drafts, release)


def test_settings_of_the_one_who_asks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVOFFLOAD_ALLOW_UNVERIFIED", "1")
    monkeypatch.setenv("KVOFFLOAD_VLLM_VERSION", "0.28.0")
    before = dict(os.environ)
    assert features_refused.is_refused("v1, states: Mamba 2", "0.27.1")
    assert dict(os.environ) == before


def test_a_verdict_names_what_is_refused_unless_that_is_all() -> None:
    counted = {"answers": 30, "answers_equal": 30, "blocks_loaded": 9, "outcome": "passed"}
    head = {"release": "0.27.1", "date": "2026-11-29", "commit": "abc", "device": "a GPU"}
    names = "v1, graphs", "v1, states: Mamba 2", "v2, states: Mamba 2"
    found = [{**head, "tests": [{"name": name, **counted} for name in names]}]
    said = {row.name: features_gpu.lines(row, found)[0].verdict for row in ROWS if row.gpu}
    assert said["states: Mamba 2 (Nemotron-H)"] == (
        "green: 60 of 60 answers equal, 18 blocks loaded; refused by default"
    )
    assert said["model runner V1"] == (
        "green: 60 of 60 answers equal, 18 blocks loaded; v1, states: Mamba 2 refused by default"
    )
    assert said["asynchronous scheduling"].endswith(" blocks loaded"), "graphs are not refused"
