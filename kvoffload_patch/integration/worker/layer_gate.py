"""Lets a forward pass wait for its loads layer by layer instead of as a whole.

The gate stands before each attention layer's first look at its KV: a wrapper on the layer's own
implementation object, which vLLM calls from inside an opaque custom op. Eager passes, compiled
ones and piecewise CUDA graphs all come by; a full CUDA graph does not.

The gate is shut unless everything about it is understood and has been seen: the configuration and
the layers, then one ordinary step in which every layer came by, and then each step by itself.
Nothing here copies or orders bytes; `CopyEngine` does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from kvoffload_patch.integration.worker.vllm_runner import kv_tensors

logger = logging.getLogger("vllm.kvoffload_patch")

_LAYERS = "vllm.model_executor.layers.attention"
# Layers that read their KV in `impl.forward` and nowhere else, with these backends.
_KINDS = (
    f"{_LAYERS}.attention.Attention",
    f"{_LAYERS}.chunked_local_attention.ChunkedLocalAttention",
)
_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "FLEX_ATTENTION", "CPU_ATTN")

WaitGroup = Callable[[int], None]


class _NotUnderstood(Exception):
    """Why loads are not awaited by layer."""


class LayerGate:
    """The gate of one model runner.

    Args:
        runner: vLLM's model runner, its KV cache initialised.
        layout: the `BlockLayout` of its KV tensors.
        groups: of rows, in which loads bring them one after the other.

    Attributes:
        groups: as given; none once the gate is shut.
        learnt: a step has come by every layer, and the gate is not shut.
        refused: why loads are not awaited by layer; empty if they may be.
    """

    def __init__(self, runner: Any, layout: Any, groups: Sequence[tuple[int, int]]) -> None:
        self.refused = ""
        self.groups = groups
        self._undo: list[tuple[Any, Any]] = []  # implementations, and the gate before each
        self._watching = self.learnt = False
        self._seen: set[str] = set()  # layers, in the pass that is watched
        self._raised: Exception | None = None  # by a wait in it
        self._wait: WaitGroup | None = None
        self._group_of: dict[str, int] = {}  # the last that has KV of a layer
        try:
            layers = _find_layers(runner, layout, groups)
            self._group_of = {name: group for name, _, group in layers}
            for name, layer, group in layers:
                self._stand_before(name, layer.impl, group)
        except Exception as error:  # noqa: BLE001 - loads are waited for as a whole then
            self.shut(f"{error}" or type(error).__name__)

    def passes(self, step: Any) -> bool:
        """Whether a step, as the scheduler describes it, is known to come by every layer.

        One request with more than one token keeps the batch out of the graphs for decodes. Blocks
        that vLLM copies before the pass would be read there.
        """
        return self.learnt and _is_mixed(step)

    def begin(self, step: Any, wait_group: WaitGroup | None) -> None:
        """Before the forward pass: what waits for a group, or None if nothing has to."""
        self._watching = wait_group is not None or (
            not self.learnt and not self.refused and _is_mixed(step)
        )
        if self._watching:
            self._seen, self._wait, self._raised = set(), wait_group, None

    def end(self) -> None:
        """After the forward pass, before anything that it computed is used.

        Raises:
            RuntimeError: a layer has not waited for its KV.
        """
        if not self._watching:
            return
        missing = self._group_of.keys() - self._seen
        waited, self._wait, self._watching = self._wait, None, False
        if missing and waited is None:
            self.shut(f"{_some(missing)} computes without passing the gate")
        elif missing:
            raise RuntimeError(
                f"kvoffload_patch: expected every attention layer to wait for its KV, found that "
                f"{_some(missing)} did not, so this step's tokens may be wrong; report it, and "
                "set KVOFFLOAD_LOAD_BY_LAYER=0 or KVOFFLOAD_DISABLE=1 until then."
            ) from self._raised
        elif not self.learnt:
            self.learnt = True
            logger.info("kvoffload_patch: loads come by layer, %d of them.", len(self._group_of))

    def close(self) -> None:
        """Take the wrappers off. One that others have wrapped stays, and calls on."""
        self._watching = self.learnt = False
        self._wait = None
        while self._undo:
            impl, gate = self._undo.pop()
            if vars(impl).get("forward") is gate:
                del impl.forward

    def shut(self, why: str) -> None:
        """Loads are waited for as a whole from now on."""
        self.close()
        self.refused, self.groups = why, ()
        logger.info("kvoffload_patch: loads are waited for as a whole: %s.", why)

    def _stand_before(self, name: str, impl: Any, group: int) -> None:
        """Wrap what reads the layer's KV. While no pass is watched, one attribute is tested."""
        wrapped = getattr(impl, "forward", None)
        if not callable(wrapped) or "forward" in vars(impl):
            raise _NotUnderstood(f"expected forward of {name} as its class defines it")

        def gate(*args: Any, **kwargs: Any) -> Any:
            if self._watching:
                self._come_by(name, group)
            return wrapped(*args, **kwargs)

        impl.forward = gate
        self._undo.append((impl, gate))

    def _come_by(self, name: str, group: int) -> None:
        """A layer is about to read its KV. What is raised is left to `end`: the pass is vLLM's."""
        try:
            if self._wait is not None:
                # Each time: the layers need not all run on one stream.
                self._wait(group)
        except Exception as error:  # noqa: BLE001 - the cause of what `end` raises
            self._raised = error
        else:
            self._seen.add(name)


def _is_mixed(step: Any) -> bool:
    """Whether a step runs all layers outside a full CUDA graph, and reads KV only in them."""
    longer = step.total_num_scheduled_tokens > len(step.num_scheduled_tokens)
    return longer and not getattr(step, "kv_cache_block_copies", None)


def _find_layers(
    runner: Any, layout: Any, groups: Sequence[tuple[int, int]]
) -> list[tuple[str, Any, int]]:
    """Name, layer and group of all that read KV of this runner.

    Raises:
        Exception: something is not understood; its text says what.
    """
    if len(groups) < 2:
        raise _NotUnderstood("a block is copied in one piece")
    _check_config(runner)
    tensors, _ = kv_tensors(runner)
    group_at: dict[int, int] = {}  # by address: layers that share a tensor share its group
    for index, tensor in enumerate(tensors):
        group = layout.group_of_tensor(index, groups)
        group_at[tensor.data_ptr()] = max(group, group_at.get(tensor.data_ptr(), 0))
    layers = runner.vllm_config.compilation_config.static_forward_context
    found = []
    for name, layer in layers.items():
        address = _kv_address(name, layer)
        if address is None:
            continue
        if address not in group_at:
            raise _NotUnderstood(f"the KV of {name} is none of the KV tensors")
        found.append((name, layer, group_at[address]))
    _check_complete(runner, found, set(group_at))
    return found


def _check_config(runner: Any) -> None:
    config = runner.vllm_config
    modes = [config.compilation_config.cudagraph_mode]
    modes.append(getattr(getattr(runner, "cudagraph_manager", None), "cudagraph_mode", None))
    for mode in modes:
        if mode is not None and mode.mixed_mode().name == "FULL":
            raise _NotUnderstood("prefills run in full CUDA graphs")
    if config.parallel_config.use_ubatching:
        raise _NotUnderstood("micro-batches run side by side")
    if config.kv_transfer_config is not None:
        raise _NotUnderstood("a KV connector may read blocks outside the layers")
    if config.speculative_config is not None:
        raise _NotUnderstood("a step of decodes has several tokens of each request")


def _kv_address(name: str, layer: Any) -> int | None:
    """Where a layer's KV begins; None if it has none."""
    cache = getattr(layer, "kv_cache", None)
    if cache is None:
        return None
    if not hasattr(cache, "data_ptr"):
        raise _NotUnderstood(f"the KV of {name} is not one tensor")
    if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
        raise _NotUnderstood(f"{name} reads the KV of another layer")
    if not cache.numel():
        return None
    kind = f"{type(layer).__module__}.{type(layer).__qualname__}"
    if kind not in _KINDS:
        raise _NotUnderstood(f"{name} is a {kind}, which may read its KV anywhere")
    backend = layer.attn_backend.get_name()
    if backend not in _BACKENDS:
        raise _NotUnderstood(f"{name} has the backend {backend}, which may read its KV anywhere")
    if layer.use_direct_call:
        raise _NotUnderstood(f"{name} is not called as an opaque operation")
    return int(cache.data_ptr())


def _check_complete(
    runner: Any, found: Sequence[tuple[str, Any, int]], addresses: set[int]
) -> None:
    """Every KV tensor has a layer that was found, and every layer of vLLM's groups was."""
    unclaimed = addresses - {int(layer.kv_cache.data_ptr()) for _, layer, _ in found}
    if unclaimed:
        raise _NotUnderstood(f"{len(unclaimed)} KV tensors belong to no attention layer")
    named = {n for group in runner.kv_cache_config.kv_cache_groups for n in group.layer_names}
    lost = named - {name for name, _, _ in found}
    if lost:
        raise _NotUnderstood(f"{_some(lost)} has KV and is not an attention layer")


def _some(names: set[str]) -> str:
    first = min(names)
    return first if len(names) == 1 else f"{first} and {len(names) - 1} more"
