"""A model of two kinds of layers: full attention, and attention to the last tokens only."""

from __future__ import annotations

import pytest
from engine.report import assert_same

PLAYED = ["conversations", "twins", "setup"]


@pytest.mark.parametrize("mode", ["inline", "parked"])
def test_groups_of_layers_come_back_together(real, mode):
    model = {"model": real.windows, "num_gpu_blocks_override": 48}
    off = real.off(PLAYED, model)
    on = real.on(PLAYED, model, {"KVOFFLOAD_LOAD_MODE": mode}, late=3)
    assert off["setup"]["groups"] == on["setup"]["groups"] == 2
    for name in PLAYED[:-1]:
        assert_same(on[name], off[name])
    assert on["conversations"]["cached"] > off["conversations"]["cached"]
    assert on["twins"]["blocks_loaded"] > 0
