"""Beside a package that hands KV over through a connector: both give hits, answers equal.

`scripts/matrix features` installs it in a folder of its own.
"""

from __future__ import annotations

import importlib.util
import json

import pytest
from engine import plain as vllm
from engine.report import assert_same

pytestmark = pytest.mark.features
PLAYED = ["conversations", "both_kinds"]


@pytest.mark.parametrize("late", [3, "stream"])
def test_kv_handed_over_by_nixl_beside_the_tier_in_both_roles(real, late):
    """In mode ``stream`` a read that the network makes into a block must not overtake its store."""
    if importlib.util.find_spec("nixl") is None:
        pytest.skip("NIXL is not installed; scripts/matrix features installs it")
    config = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
    engine = {"prefill_decode": True, "kv_transfer_config": json.dumps(config)}
    off = real.off(PLAYED)
    played = [*PLAYED, "prefill_side"]
    bare = vllm.must_play(real.off(PLAYED, engine))
    on = real.on(played, engine, {"KVOFFLOAD_LOAD_MODE": "inline"}, late=late)
    for name in PLAYED:
        assert_same(bare[name], off[name])
        assert_same(on[name], off[name])
    # Some releases count what a connector has brought as cached, others do not.
    counted = any(bare["both_kinds"]["cached"])
    brought = bare["both_kinds"]["external"] if counted else 0
    # A prompt's last token, which is computed again, is not counted by 0.19.
    again = brought - sum(bare["both_kinds"]["cached"])
    assert again in (0, 2), "the prefix was not pushed out"
    # Of each prompt the prefix is the tier's, and what the other engine has computed is NIXL's.
    assert on["both_kinds"]["external"] == 2 * 31
    assert on["both_kinds"]["cached"] == [512 + 31 * counted - again // 2] * 2
    assert on["both_kinds"]["blocks_loaded"] > 0
    assert on["prefill_side"]["loaded"] > 0, "the tier had no hits where prompts are computed"
