"""The tier of a running engine is paused, resumed, resized and emptied between prompts."""

from __future__ import annotations

import pytest
from engine import gpu_answers, release


@pytest.mark.parametrize(
    "engine",
    [pytest.param({}, marks=pytest.mark.features), {"async_scheduling": True}],
    ids=["plain", "async"],
)
def test_answers_are_those_of_plain_vllm_whatever_the_tier_is_told(real, engine, tmp_path):
    off = real.off(["commanded"])["commanded"]
    tier = {"KVOFFLOAD_CPU_GIB": "0.25", "KVOFFLOAD_CONTROL": "1"}
    run = real.on(["commanded"], engine, tier, 3, XDG_RUNTIME_DIR=str(tmp_path))
    on = run["commanded"]
    assert on["tokens"] == off["tokens"]
    block = release.block_size()
    full = [420 // block * block] * len(on["tokens"]["first"])
    had = [name for name in (*gpu_answers.HAD, *gpu_answers.NOT_HAD) if on["cached"][name] == full]
    assert had == list(gpu_answers.HAD)
    assert not any(tokens for name in gpu_answers.NOT_HAD for tokens in on["cached"][name])
    _, before, smaller, larger, emptied = on["capacities"]
    assert 0 < smaller < before == larger == emptied
    assert on["states"] == ["paused", "on", "on", "on", "on"]
    assert all(on["tier"]["removed"][why] > 0 for why in ("emptied", "resized"))
    assert on["tier"]["paused"] > 0 and on["tier"]["failed"] == 0
