"""The gate before each layer: what it waits for, what it has to have seen, and when it is shut."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvoffload_patch.integration.worker.layerwise import LayerGate
from kvoffload_patch.transfer.layout import BlockLayout

LAYERS = 4
FOLDER = "vllm.model_executor.layers.attention"


class Mode:
    """A CUDA graph mode, by the name of its mode for mixed batches."""

    def __init__(self, mixed: str) -> None:
        self.name = mixed

    def mixed_mode(self) -> Mode:
        return self


class Impl:
    def __init__(self, log: list) -> None:
        self.log = log

    def forward(self, name: str) -> str:
        self.log.append(("read", name))
        return name

    forward_mha = forward_mqa = forward


class Layer:
    """A layer as vLLM makes them; `run` is what its custom op does."""

    def __init__(self, name: str, cache: Any, log: list, backend: str = "FLASH_ATTN") -> None:
        self.name = name
        self.kv_cache = cache
        self.impl = Impl(log)
        self.attn_backend = SimpleNamespace(get_name=lambda: backend)
        self.use_direct_call = False

    def run(self) -> None:
        assert self.impl.forward(self.name) == self.name


Layer.__module__, Layer.__qualname__ = f"{FOLDER}.attention", "Attention"


class LatentLayer(Layer):
    def forward_impl(self, name: str) -> str:
        return self.impl.forward_mha(name)

    def run(self) -> None:
        assert self.forward_impl(self.name) == self.name


LatentLayer.__module__, LatentLayer.__qualname__ = f"{FOLDER}.mla_attention", "MLAAttention"


class OwnLayer(Layer):
    """A model's own attention."""


class Machine:
    """A model runner with layers, and an engine that writes down who waits for what."""

    def __init__(self, kind: type[Layer] = Layer, layers: int = LAYERS) -> None:
        self.log: list = []
        self.tensors = [torch.zeros(2, 5, 16, dtype=torch.uint8) for _ in range(layers)]
        self.layers = {
            f"layers.{i}.attn": kind(f"layers.{i}.attn", t, self.log)
            for i, t in enumerate(self.tensors)
        }
        context = {"layers.0.experts": SimpleNamespace(), **self.layers}
        groups = [SimpleNamespace(layer_names=list(self.layers))]
        self.runner = SimpleNamespace(
            kv_caches=list(self.tensors),
            kv_cache_config=SimpleNamespace(
                num_blocks=5, kv_cache_tensors=[], kv_cache_groups=groups
            ),
            vllm_config=SimpleNamespace(
                compilation_config=SimpleNamespace(
                    static_forward_context=context, cudagraph_mode=Mode("PIECEWISE")
                ),
                parallel_config=SimpleNamespace(use_ubatching=False),
                kv_transfer_config=None,
                num_speculative_tokens=0,
            ),
        )
        self.engine = SimpleNamespace(
            wait_group=lambda group: self.log.append(("wait", group)),
            wait_all_loads=lambda: self.log.append(("wait", "all")),
        )
        self.max_groups = 2

    def add(self, name: str, layer: Any) -> None:
        self.runner.vllm_config.compilation_config.static_forward_context[name] = layer

    def gate(self) -> LayerGate:
        layout = BlockLayout(self.runner.kv_caches, 5)
        return LayerGate(self.runner, layout, layout.cut(self.max_groups, 1), self.engine)

    def forward(self, *but: str) -> list:
        """A forward pass in which some layers do not come by; what happened in it."""
        del self.log[:]
        for name, layer in self.layers.items():
            if name not in but:
                layer.run()
        return list(self.log)


def step(*tokens: int, copies: list | None = None) -> Any:
    scheduled = {f"r{i}": n for i, n in enumerate(tokens)}
    return SimpleNamespace(num_scheduled_tokens=scheduled, kv_cache_block_copies=copies)


def learnt(machine: Machine) -> LayerGate:
    gate = machine.gate()
    assert gate.refused == ""
    assert gate.begin(step(8), True) is False, "before every layer was seen"
    machine.forward()
    gate.end()
    assert gate.refused == ""
    return gate


@pytest.mark.parametrize("kind", [Layer, LatentLayer])
def test_every_layer_waits_for_its_group_before_it_reads(kind: type[Layer]) -> None:
    machine = Machine(kind)
    gate = learnt(machine)
    assert gate.begin(step(1, 8), True) is True
    seen = machine.forward()
    reads = [("read", f"layers.{i}.attn") for i in range(LAYERS)]
    assert [entry for entry in seen if entry[0] == "read"] == reads
    for i, group in enumerate((0, 0, 1, 1)):
        at = seen.index(reads[i])
        before = seen[seen.index(reads[i - 1]) + 1 : at] if i else seen[:at]
        assert before and set(before) == {("wait", group)}
    gate.end()
    assert machine.log[-1] == ("wait", "all"), "for what comes after the pass"


def test_an_ordinary_step_waits_for_nothing() -> None:
    machine = Machine()
    gate = learnt(machine)
    assert gate.begin(step(8), False) is False
    assert {kind for kind, _ in machine.forward()} == {"read"}
    gate.end()
    assert {kind for kind, _ in machine.log} == {"read"}


@pytest.mark.parametrize("skipped", range(LAYERS))
def test_a_layer_that_does_not_come_by_raises(skipped: int) -> None:
    machine = Machine()
    gate = learnt(machine)
    assert gate.begin(step(8), True)
    machine.forward(f"layers.{skipped}.attn")
    with pytest.raises(RuntimeError, match=rf"found that layers.{skipped}.attn did not"):
        gate.end()


def test_a_pass_in_which_no_layer_comes_by_raises() -> None:
    machine = Machine()
    gate = learnt(machine)
    assert gate.begin(step(8), True)
    with pytest.raises(RuntimeError, match=r"layers.0.attn and 3 more did not"):
        gate.end()


def test_a_pass_that_died_leaves_nothing_behind() -> None:
    machine = Machine()
    gate = learnt(machine)
    assert gate.begin(step(8), True)
    machine.forward("layers.3.attn")
    assert gate.begin(step(8), True)
    machine.forward("layers.0.attn")
    with pytest.raises(RuntimeError, match=r"found that layers.0.attn did not"):
        gate.end()
    assert gate.begin(step(8), True)
    assert gate.begin(step(1), False) is False
    gate.end()


def test_a_layer_unseen_in_the_first_step_shuts_the_gate_for_good() -> None:
    machine = Machine()
    gate = machine.gate()
    gate.begin(step(8), True)
    machine.forward("layers.1.attn")
    gate.end()
    assert gate.refused == "layers.1.attn computes without passing the gate"
    assert gate.begin(step(8), True) is False
    machine.forward()
    gate.end()
    assert gate.begin(step(8), True) is False
    assert vars(machine.layers["layers.0.attn"].impl) == {"log": machine.log}


NOT_NOW = {
    "a decode": step(1, 1),
    "no tokens": step(),
    "a decode with drafts": step(4, 2),
    "blocks are copied before the pass": step(8, copies=[(1, 2)]),
}


@pytest.mark.parametrize("what", NOT_NOW)
def test_steps_that_are_not_by_layer_and_teach_nothing(what: str) -> None:
    machine = Machine()
    machine.runner.vllm_config.num_speculative_tokens = 3
    gate = machine.gate()
    assert gate.begin(NOT_NOW[what], True) is False
    gate.end()
    assert gate.refused == ""
    assert gate.begin(step(8), True) is False, "it has seen nothing yet"
    machine.forward()
    gate.end()
    assert gate.begin(NOT_NOW[what], True) is False
    assert {kind for kind, _ in machine.forward()} == {"read"}
    assert gate.begin(step(5), True) is True


@pytest.mark.parametrize("name", ["uniform_decode_query_len", "decode_query_len"])
def test_a_decode_is_as_long_as_the_runner_says(name: str) -> None:
    machine = Machine()
    setattr(machine.runner, name, 6)
    gate = learnt(machine)
    assert gate.begin(step(6), True) is False
    assert gate.begin(step(7), True) is True


@pytest.mark.parametrize(
    ("proposer", "attribute"),
    [("drafter", "_draft_attn_layer_names"), ("speculator", "draft_attn_layer_names")],
)
def test_drafting_layers_run_after_the_pass(proposer: str, attribute: str) -> None:
    machine = Machine()
    draft = "layers.3.attn"
    setattr(machine.runner, proposer, SimpleNamespace(**{attribute: {draft}}))
    gate = machine.gate()
    for by_layer in (False, True):
        assert gate.begin(step(8), True) is by_layer
        machine.forward(draft)
        gate.end()
    assert machine.log[-1] == ("wait", "all")
    assert gate.begin(step(8), True)
    machine.forward(draft, "layers.0.attn")
    with pytest.raises(RuntimeError, match=r"layers.0.attn did not"):
        gate.end()


def test_a_layer_that_shares_anothers_kv_waits_for_it() -> None:
    machine = Machine()
    sharer = Layer("layers.4.attn", machine.tensors[3], machine.log)
    sharer.kv_sharing_target_layer_name = "layers.3.attn"
    machine.add("layers.4.attn", sharer)
    machine.layers["layers.4.attn"] = sharer
    gate = learnt(machine)
    assert gate.begin(step(8), True)
    assert machine.forward()[-2:] == [("wait", 1), ("read", "layers.4.attn")]
    gate.end()
    assert gate.begin(step(8), True)
    machine.forward("layers.4.attn")
    with pytest.raises(RuntimeError, match=r"layers.4.attn did not"):
        gate.end()


def test_layers_of_two_groups_on_one_tensor_wait_for_the_last_of_its_bytes() -> None:
    machine = Machine()
    wide = torch.zeros(2, 5, 16, dtype=torch.uint8)
    machine.runner.kv_caches = [machine.tensors[0][:1], wide, machine.tensors[0]]
    machine.layers = {
        "a": Layer("a", machine.tensors[0], machine.log),
        "b": Layer("b", wide, machine.log),
    }
    machine.runner.kv_cache_config.kv_cache_groups[0].layer_names = ["a", "b"]
    machine.runner.vllm_config.compilation_config.static_forward_context = machine.layers
    machine.max_groups = 4  # K and V of each apart
    gate = learnt(machine)
    assert gate.begin(step(8), True)
    waits = [entry for entry in machine.forward() if entry[0] == "wait"]
    assert waits == [("wait", 1), ("wait", 3)]


def test_close_leaves_layers_as_they_were() -> None:
    machine = Machine(LatentLayer)
    before = {name: (dict(vars(x)), dict(vars(x.impl))) for name, x in machine.layers.items()}
    gate = learnt(machine)
    assert gate.begin(step(8), True)
    gate.close()
    assert {n: (vars(x), vars(x.impl)) for n, x in machine.layers.items()} == before
    assert {kind for kind, _ in machine.forward()} == {"read"}


def with_layer(**changes: Any) -> Callable[[Machine], None]:
    def change(machine: Machine) -> None:
        for name, value in changes.items():
            setattr(machine.layers["layers.2.attn"], name, value)

    return change


def one_piece(machine: Machine) -> None:
    machine.max_groups = 1


def full_graphs(machine: Machine) -> None:
    machine.runner.vllm_config.compilation_config.cudagraph_mode = Mode("FULL")


def full_graphs_of_the_runner(machine: Machine) -> None:
    machine.runner.cudagraph_manager = SimpleNamespace(cudagraph_mode=Mode("FULL"))


def micro_batches(machine: Machine) -> None:
    machine.runner.vllm_config.parallel_config.use_ubatching = True


def connector(machine: Machine) -> None:
    machine.runner.vllm_config.kv_transfer_config = SimpleNamespace()


def own_class(machine: Machine) -> None:
    machine.add("layers.2.attn", OwnLayer("layers.2.attn", machine.tensors[2], []))


def strange_backend(machine: Machine) -> None:
    layer = Layer("layers.2.attn", machine.tensors[2], [], backend="HPC_ATTN")
    machine.add("layers.2.attn", layer)


def wrapped_by_another(machine: Machine) -> None:
    machine.layers["layers.2.attn"].impl.forward = print


def one_impl_for_two(machine: Machine) -> None:
    layers = machine.layers
    layers["layers.2.attn"].impl = layers["layers.3.attn"].impl


def unclaimed_tensor(machine: Machine) -> None:
    machine.runner.kv_caches.append(torch.zeros(2, 5, 16, dtype=torch.uint8))


def layer_without_kv(machine: Machine) -> None:
    machine.runner.kv_cache_config.kv_cache_groups[0].layer_names.append("layers.9.mixer")


def hidden_sharing(machine: Machine) -> None:
    layer = Layer("layers.4.attn", torch.tensor([]), [])
    layer.kv_sharing_target_layer_name = "layers.3.attn"
    machine.add("layers.4.attn", layer)


REFUSALS: dict[str, tuple[Callable[[Machine], None], str]] = {
    "one group": (one_piece, "a block is copied in one piece"),
    "full graphs": (full_graphs, "prefills run in full CUDA graphs"),
    "full graphs of the runner": (full_graphs_of_the_runner, "prefills run in full CUDA graphs"),
    "micro-batches": (micro_batches, "micro-batches run side by side"),
    "a KV connector": (connector, "a KV connector may read blocks outside the layers"),
    "a model's own attention": (own_class, "layers.2.attn is a .*OwnLayer, which may read"),
    "a strange backend": (strange_backend, "layers.2.attn has the backend HPC_ATTN"),
    "wrapped by another": (wrapped_by_another, "impl.forward of layers.2.attn as its class"),
    "one implementation for two layers": (one_impl_for_two, "impl.forward of layers.3.attn"),
    "no opaque op": (with_layer(use_direct_call=True), "layers.2.attn is not called as an opaque"),
    "KV elsewhere": (with_layer(hisparse_cache=object()), "layers.2.attn is not called"),
    "two tensors": (with_layer(kv_cache=[1, 2]), "the KV of layers.2.attn is not one tensor"),
    "foreign KV": (with_layer(kv_cache=torch.ones(9)), "layers.2.attn is none of the KV tensors"),
    "a tensor of nobody": (unclaimed_tensor, "1 KV tensors belong to no attention layer"),
    "KV of no layer": (layer_without_kv, "layers.9.mixer has KV and is not an attention layer"),
    "sharing unseen": (hidden_sharing, "layers.4.attn shares KV that it does not show"),
    "no implementation": (with_layer(impl=None), "has no attribute|as its class defines it"),
}


@pytest.mark.parametrize("why", REFUSALS)
def test_what_is_not_understood_shuts_the_gate(why: str, caplog: pytest.LogCaptureFixture) -> None:
    change, message = REFUSALS[why]
    machine = Machine()
    change(machine)
    before = [dict(vars(x.impl)) if x.impl else None for x in machine.layers.values()]
    with caplog.at_level("INFO", logger="vllm.kvoffload_patch"):
        gate = machine.gate()
    assert re.search(message, gate.refused)
    assert caplog.messages == [f"kvoffload_patch: loads are waited for as a whole: {gate.refused}."]
    assert [dict(vars(x.impl)) if x.impl else None for x in machine.layers.values()] == before
    for _ in range(2):
        assert gate.begin(step(8), True) is False
        gate.end()


def test_layers_without_kv_are_no_concern() -> None:
    machine = Machine()
    machine.add("encoder.attn", OwnLayer("encoder.attn", torch.tensor([]), []))
    learnt(machine)
