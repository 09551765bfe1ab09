"""A rank whose forward pass may wait for loads layer by layer: what it says of that."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from integration.worker.test_layer_gate import Machine, step

from kvoffload_patch.integration.protocol import RESULT
from kvoffload_patch.integration.worker.tier import RankTier
from kvoffload_patch.transfer.backends import choose
from kvoffload_patch.transfer.backends.torch import TorchBackend


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Its blocks are large enough for groups; its tier is closed in the end."""
    monkeypatch.setattr(choose, "LOAD_GROUP_BYTES", 1)
    made = Machine()
    made.runner.vllm_config.parallel_config.world_size = 1
    made.tier = RankTier(made.runner, num_slots=5, by_layer=True)
    yield made
    made.tier.close()
    assert all("forward" not in vars(layer.impl) for layer in made.layers.values())


def said(machine: Any, *but: str) -> bool:
    """Whether loads come by layer, after a step in which some layers do not come by."""
    machine.tier.begin_step(None, step(8))
    machine.forward(*but)
    machine.tier.end_forward()
    output = SimpleNamespace(sampled_token_ids=[[1]], req_ids=["a"])
    return bool(getattr(machine.tier.end_step(output), RESULT).by_layer)


class TestGroups:
    """With copies that bring groups."""

    @pytest.fixture(autouse=True)
    def groups(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(TorchBackend, "groups", ((0, 2), (2, 4)))

    def test_it_is_said_once_a_step_has_come_by_every_layer(self, machine: Any) -> None:
        machine.tier.begin_step(None, step(1, 1))
        output = SimpleNamespace(sampled_token_ids=[[1]], req_ids=["a"])
        assert not getattr(machine.tier.end_step(output), RESULT).by_layer, "a step of decodes"
        assert machine.tier.overlap == 0.5 and said(machine) and said(machine)

    def test_it_is_not_said_where_a_layer_does_not_come_by(self, machine: Any) -> None:
        """So that the engine does not count on what no step hides."""
        assert not said(machine, "layers.1.attn") and not said(machine)


def test_copies_that_bring_all_layers_at_once_leave_no_gate(
    machine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert all("forward" not in vars(layer.impl) for layer in machine.layers.values())
    with caplog.at_level("INFO", logger="vllm.kvoffload_patch"):
        assert not said(machine) and not said(machine)
    assert machine.tier.overlap == 0 and caplog.messages == []
    assert machine.tier._gate.refused == "copies torch bring all layers of a block at once"


@pytest.mark.parametrize(("ms_per_byte", "slowdown"), [(0.0, 1.0), (3.0, 3.0)])
def test_it_is_said_how_long_loads_take_lately(
    machine: Any, ms_per_byte: float, slowdown: float
) -> None:
    """In times of what they took when the tier was opened; 1 before any was measured."""
    machine.tier._load_ms_per_byte = 1.0
    machine.tier._load_times = SimpleNamespace(ms_per_byte=lambda: ms_per_byte)
    output = SimpleNamespace(sampled_token_ids=[[1]], req_ids=["a"])
    machine.tier.begin_step(None, step(1, 1))
    assert getattr(machine.tier.end_step(output), RESULT).slowdown == slowdown
