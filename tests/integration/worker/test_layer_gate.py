"""The gate before each layer: what it waits for, what it has to have seen, and when it is shut."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvoffload_patch.integration.worker.layer_gate import LayerGate
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
    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def forward(self, name: str) -> str:
        self.log.append(("read", name))
        return name


class Layer:
    """A layer as vLLM makes them; `run` is what its custom op does."""

    def __init__(self, name: str, cache: Any, log: list[Any], backend: str = "FLASH_ATTN") -> None:
        self.name = name
        self.kv_cache = cache
        self.kv_sharing_target_layer_name: str | None = None
        self.impl = Impl(log)
        self.attn_backend = SimpleNamespace(get_name=lambda: backend)
        self.use_direct_call = False

    def run(self) -> None:
        assert self.impl.forward(self.name) == self.name


Layer.__module__, Layer.__qualname__ = f"{FOLDER}.attention", "Attention"


class OwnLayer(Layer):
    """A model's own attention."""


class Machine:
    """A model runner with layers, and a list of who reads and who waits for what."""

    def __init__(self, layers: int = LAYERS) -> None:
        self.log: list[Any] = []
        self.tensors = [torch.zeros(2, 5, 16, dtype=torch.uint8) for _ in range(layers)]
        self.layers = {
            f"layers.{i}.attn": Layer(f"layers.{i}.attn", t, self.log)
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
                speculative_config=None,
            ),
        )
        self.most_groups = 2

    def wait(self, group: int) -> None:
        self.log.append(("wait", group))

    def add(self, name: str, layer: Any) -> None:
        self.runner.vllm_config.compilation_config.static_forward_context[name] = layer

    def gate(self) -> LayerGate:
        layout = BlockLayout(self.runner.kv_caches, 5)
        return LayerGate(self.runner, layout, layout.cut(self.most_groups, 1))

    def forward(self, *but: str) -> list[Any]:
        """A forward pass in which some layers do not come by; what happened in it."""
        del self.log[:]
        for name, layer in self.layers.items():
            if name not in but:
                layer.run()
        return list(self.log)


def step(*tokens: int, copies: list[Any] | None = None) -> Any:
    scheduled = {f"r{i}": n for i, n in enumerate(tokens)}
    return SimpleNamespace(
        num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(tokens),
        kv_cache_block_copies=copies,
    )  # fmt: skip


def learnt(machine: Machine) -> LayerGate:
    gate = machine.gate()
    assert gate.refused == ""
    assert not gate.passes(step(8)), "before every layer was seen"
    gate.begin(step(8), None)
    machine.forward()
    gate.end()
    assert gate.refused == "" and gate.passes(step(8))
    return gate


def test_every_layer_waits_for_its_group_before_it_reads() -> None:
    machine = Machine()
    gate = learnt(machine)
    gate.begin(step(1, 8), machine.wait)
    seen = []
    for i, group in enumerate((0, 0, 1, 1)):
        seen += [("wait", group), ("read", f"layers.{i}.attn")]
    assert machine.forward() == seen
    gate.end()


def test_an_ordinary_step_waits_for_nothing() -> None:
    machine = Machine()
    gate = learnt(machine)
    gate.begin(step(8), None)
    assert {kind for kind, _ in machine.forward("layers.1.attn")} == {"read"}
    gate.end()
    assert gate.refused == ""


@pytest.mark.parametrize("skipped", range(LAYERS))
def test_a_layer_that_does_not_come_by_raises(skipped: int) -> None:
    machine = Machine()
    gate = learnt(machine)
    gate.begin(step(8), machine.wait)
    machine.forward(f"layers.{skipped}.attn")
    with pytest.raises(RuntimeError, match=rf"found that layers.{skipped}.attn did not"):
        gate.end()


def test_a_pass_in_which_no_layer_comes_by_raises() -> None:
    machine = Machine()
    gate = learnt(machine)
    gate.begin(step(8), machine.wait)
    with pytest.raises(RuntimeError, match=r"layers.0.attn and 3 more did not"):
        gate.end()


def test_a_wait_that_raises_ends_no_pass_and_is_said_after_it() -> None:
    """An exception within the pass would be vLLM's, which nobody hears of on some ranks."""
    machine = Machine()
    gate = learnt(machine)

    def wait(group: int) -> None:
        if group:
            raise OSError("no such device")

    gate.begin(step(8), wait)
    assert machine.forward() == [("read", f"layers.{i}.attn") for i in range(LAYERS)]
    with pytest.raises(RuntimeError, match=r"layers.2.attn and 1 more did not") as raised:
        gate.end()
    assert str(raised.value.__cause__) == "no such device"


def test_a_pass_that_died_leaves_nothing_behind() -> None:
    machine = Machine()
    gate = learnt(machine)
    gate.begin(step(8), machine.wait)
    machine.forward("layers.3.attn")
    gate.begin(step(8), machine.wait)
    machine.forward("layers.0.attn")
    with pytest.raises(RuntimeError, match=r"found that layers.0.attn did not"):
        gate.end()
    gate.begin(step(8), machine.wait)
    gate.begin(step(1), None)
    gate.end()


def test_a_layer_unseen_in_the_first_step_shuts_the_gate_for_good() -> None:
    machine = Machine()
    gate = machine.gate()
    gate.begin(step(8), None)
    machine.forward("layers.1.attn")
    gate.end()
    assert gate.refused == "layers.1.attn computes without passing the gate"
    gate.begin(step(8), None)
    machine.forward()
    gate.end()
    assert not gate.passes(step(8))
    assert vars(machine.layers["layers.0.attn"].impl) == {"log": machine.log}


@pytest.mark.parametrize("end", [LayerGate.close, lambda gate: gate.shut("for a test")])
def test_a_gate_that_has_learnt_and_is_taken_off_lets_no_step_wait_by_layer(
    end: Callable[[LayerGate], None],
) -> None:
    machine = Machine()
    gate = learnt(machine)
    assert gate.learnt and gate.groups == BlockLayout(machine.tensors, 5).cut(2, 1)
    gate.begin(step(8), machine.wait)
    end(gate)
    assert not gate.learnt and not gate.passes(step(8))
    assert {kind for kind, _ in machine.forward()} == {"read"}
    gate.end()  # of the pass under way


def test_that_loads_come_by_layer_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="vllm.kvoffload_patch")
    machine = Machine()
    gate = learnt(machine)
    for _ in range(2):
        gate.begin(step(8), machine.wait)
        machine.forward()
        gate.end()
    assert caplog.messages == ["kvoffload_patch: loads come by layer, 4 of them."]


NOT_NOW = {
    "decodes": step(1, 1),
    "no tokens": step(),
    "blocks are copied before the pass": step(8, copies=[(1, 2)]),
}


@pytest.mark.parametrize("what", NOT_NOW)
def test_steps_that_do_not_come_by_every_layer_teach_nothing(what: str) -> None:
    machine = Machine()
    gate = machine.gate()
    gate.begin(NOT_NOW[what], None)
    gate.end()
    assert gate.refused == "" and not gate.passes(step(8)), "it has seen nothing yet"
    gate = learnt(machine_of(gate, machine))
    assert not gate.passes(NOT_NOW[what]) and gate.passes(step(5))


def machine_of(gate: LayerGate, machine: Machine) -> Machine:
    gate.close()
    return machine


@pytest.mark.parametrize("order", [1, -1])
def test_layers_on_one_tensor_wait_for_the_last_of_its_bytes(order: int) -> None:
    machine = Machine()
    wide = torch.zeros(2, 5, 16, dtype=torch.uint8)
    shared = [machine.tensors[0][:1], machine.tensors[0]][::order]
    machine.runner.kv_caches = [shared[0], wide, shared[1]]
    machine.layers = {
        "a": Layer("a", machine.tensors[0], machine.log),
        "b": Layer("b", wide, machine.log),
    }
    machine.runner.kv_cache_config.kv_cache_groups[0].layer_names = ["a", "b"]
    machine.runner.vllm_config.compilation_config.static_forward_context = machine.layers
    machine.most_groups = 4  # K and V of each apart
    gate = learnt(machine)
    gate.begin(step(8), machine.wait)
    waits = [entry for entry in machine.forward() if entry[0] == "wait"]
    assert waits == [("wait", 1), ("wait", 3)]


def test_close_leaves_layers_as_they_were() -> None:
    machine = Machine()
    before = {name: (dict(vars(x)), dict(vars(x.impl))) for name, x in machine.layers.items()}
    gate = learnt(machine)
    gate.begin(step(8), machine.wait)
    gate.close()
    assert {n: (vars(x), vars(x.impl)) for n, x in machine.layers.items()} == before
    assert {kind for kind, _ in machine.forward()} == {"read"}


def with_layer(**changes: Any) -> Callable[[Machine], None]:
    def change(machine: Machine) -> None:
        for name, value in changes.items():
            setattr(machine.layers["layers.2.attn"], name, value)

    return change


def one_piece(machine: Machine) -> None:
    machine.most_groups = 1


def full_graphs(machine: Machine) -> None:
    machine.runner.vllm_config.compilation_config.cudagraph_mode = Mode("FULL")


def full_graphs_of_the_runner(machine: Machine) -> None:
    machine.runner.cudagraph_manager = SimpleNamespace(cudagraph_mode=Mode("FULL"))


def micro_batches(machine: Machine) -> None:
    machine.runner.vllm_config.parallel_config.use_ubatching = True


def connector(machine: Machine) -> None:
    machine.runner.vllm_config.kv_transfer_config = SimpleNamespace()


def drafts(machine: Machine) -> None:
    machine.runner.vllm_config.speculative_config = SimpleNamespace()


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


def foreign_kv(machine: Machine) -> None:
    machine.runner.kv_cache_config.kv_cache_groups[0].layer_names.remove("layers.2.attn")
    machine.layers["layers.2.attn"].kv_cache = torch.ones(9)


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
    "drafted tokens": (drafts, "a step of decodes has several tokens of each request"),
    "a model's own attention": (own_class, "layers.2.attn is a .*OwnLayer, which may read"),
    "a strange backend": (strange_backend, "layers.2.attn has the backend HPC_ATTN"),
    "wrapped by another": (wrapped_by_another, "forward of layers.2.attn as its class"),
    "one implementation for two layers": (one_impl_for_two, "forward of layers.3.attn"),
    "no opaque op": (with_layer(use_direct_call=True), "layers.2.attn is not called as an opaque"),
    "two tensors": (with_layer(kv_cache=[1, 2]), "the KV of layers.2.attn is not one tensor"),
    "foreign KV": (foreign_kv, "layers.2.attn is none of the KV tensors"),
    "a tensor of nobody": (unclaimed_tensor, "1 KV tensors belong to no attention layer"),
    "KV of no layer": (layer_without_kv, "layers.9.mixer has KV and is not an attention layer"),
    "sharing unseen": (hidden_sharing, "layers.4.attn reads the KV of another layer"),
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
        assert not gate.passes(step(8)) and gate.groups == ()
        gate.begin(step(8), None)
        gate.end()


def test_layers_without_kv_are_no_concern() -> None:
    machine = Machine()
    machine.add("encoder.attn", OwnLayer("encoder.attn", torch.tensor([]), []))
    learnt(machine)


def test_what_others_have_put_before_a_layer_or_taken_off_it_is_left_to_them() -> None:
    """As a profiler does. The tier is closed whatever they have done."""
    machine = Machine()
    gate = learnt(machine)
    profiled, bare, *_ = (layer.impl for layer in machine.layers.values())
    seen: list[str] = []
    inner = profiled.forward

    def profile(name: str) -> str:
        seen.append(name)
        return inner(name)

    vars(profiled)["forward"] = profile
    del bare.forward
    gate.close()
    machine.forward()
    assert seen == ["layers.0.attn"] and vars(profiled)["forward"] is profile
    others = [layer.impl for layer in machine.layers.values()][1:]
    assert not any("forward" in vars(impl) for impl in others)
