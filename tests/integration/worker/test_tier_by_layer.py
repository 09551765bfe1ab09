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
from kvoffload_patch.transfer.errors import TransferError


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


class Awaited:
    """Stands for a `CopyEngine` whose loads are under way: what is made to wait for them, when."""

    def __init__(self, log: list[Any], engine: Any) -> None:
        self._log = log
        self.poll, self.end_step, self.failed = engine.poll, engine.end_step, engine.failed
        self.close = engine.close

    def begin_step(self, plan: object, by_layer: bool) -> bool:
        if not by_layer:
            self.wait_all_groups()
        return by_layer

    def wait_group(self, group: int) -> None:
        self._log.append(("wait", group))

    def wait_all_groups(self) -> None:
        self._log.append(("wait", "all"))


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

    def test_only_a_pass_that_comes_by_every_layer_begins_before_its_loads_are_there(
        self, machine: Any
    ) -> None:
        """What comes after it waits for all of them, whatever its layers have waited for."""
        assert said(machine)
        tier, log = machine.tier, machine.log
        tier._engine = Awaited(log, tier._engine)
        tier.begin_step(None, step(8))
        assert machine.forward()[::2] == [("wait", group) for group in range(4)]
        del log[:]
        tier.end_forward()
        assert log == [("wait", "all")]
        del log[:]
        tier.begin_step(None, step(1, 1))
        assert log == [("wait", "all")], "a graph of decodes comes by no layer"
        assert not [one for one in machine.forward() if one[0] == "wait"]
        tier.end_forward()

    def test_a_tier_that_cannot_be_opened_leaves_no_gate(
        self, machine: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """vLLM may serve on without it."""
        machine.tier.close()
        monkeypatch.setattr("kvoffload_patch.transfer.canary._equal", lambda one, other: False)
        with pytest.raises(TransferError, match="other bytes"):
            RankTier(machine.runner, num_slots=5, by_layer=True)
        assert all("forward" not in vars(layer.impl) for layer in machine.layers.values())
        machine.tier = SimpleNamespace(close=int)


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
