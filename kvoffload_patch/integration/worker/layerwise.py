"""Lets a forward pass wait for its loads layer by layer instead of as a whole.

The gate stands before each attention layer's first look at its KV: a wrapper on the layer's own
implementation object, which vLLM calls from inside an opaque custom op. Eager passes, compiled
ones and piecewise CUDA graphs all come by; a full CUDA graph does not.

The gate is shut unless everything about it is understood and has been seen: the configuration
and the layers (`find_layers`), then one ordinary step in which every layer came by, and then
each step by itself. Nothing here copies or orders bytes; `CopyEngine` does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvoffload_patch.integration.worker.vllm_runner import kv_tensors

logger = logging.getLogger("vllm.kvoffload_patch")

_ATTENTION = "vllm.model_executor.layers.attention"
# What reads a layer's KV, from the layer on. Other classes may read it elsewhere, too.
_READERS: dict[str, tuple[str, ...]] = {
    f"{_ATTENTION}.attention.Attention": ("impl.forward",),
    f"{_ATTENTION}.chunked_local_attention.ChunkedLocalAttention": ("impl.forward",),
    f"{_ATTENTION}.mla_attention.MLAAttention": (
        "forward_impl",
        "impl.forward_mha",
        "impl.forward_mqa",
    ),
}
# Backends whose implementation reads KV there and nowhere else.
_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "FLEX_ATTENTION", "CPU_ATTN")
_MLA_BACKENDS = ("FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA", "FLASHINFER_MLA", "CUTLASS_MLA")
# Where a proposer of draft tokens keeps the names of its layers, over runners and releases.
_DRAFT_NAMES = ("_draft_attn_layer_names", "draft_attn_layer_names", "attn_layer_names")


class _NotUnderstood(Exception):
    """Why loads are not brought by layer."""


@dataclass(frozen=True)
class GatedLayer:
    """An attention layer, and the last group of a load that has bytes of its KV."""

    name: str
    layer: Any
    group: int
    readers: tuple[str, ...]


class _Pass:
    """One forward pass that is watched; ``wait`` is called with a layer's group, if at all."""

    __slots__ = ("seen", "wait")

    def __init__(self, wait: Callable[[int], None] | None) -> None:
        self.seen: set[str] = set()
        self.wait = wait


class LayerGate:
    """The gate of one model runner.

    Args:
        runner: vLLM's model runner, its KV cache initialised.
        layout: the `BlockLayout` of its KV tensors.
        groups: row ranges in which a load by layer arrives, in this order.
        engine: the `CopyEngine`: ``wait_group(group)`` and ``wait_all_loads()``.

    Attributes:
        refused: why loads are not brought by layer; empty if they may be.
    """

    def __init__(
        self, runner: Any, layout: Any, groups: Sequence[tuple[int, int]], engine: Any
    ) -> None:
        self.refused = ""
        self._engine = engine
        self._decode_tokens = _decode_tokens(runner)
        self._drafting = _draft_layers(runner)
        self._expected: frozenset[str] | None = None  # not seen yet
        self._pass: _Pass | None = None
        self._undo: list[tuple[Any, str]] = []
        try:
            layers = find_layers(runner, layout, groups)
            self._names = {layer.name for layer in layers}
            for layer in layers:
                self._stand_before(layer)
        except Exception as error:  # noqa: BLE001 - loads are waited for as a whole then
            self._shut(f"{error}" or type(error).__name__)
        else:
            logger.info(
                "kvoffload_patch: loads may come by layer, in %d groups for %d layers.",
                len(groups),
                len(layers),
            )

    def begin(self, scheduler_output: Any, by_layer: bool) -> bool:
        """Before the forward pass: watch it.

        Args:
            by_layer: whether this step has loads that may be waited for by layer.

        Returns:
            Whether they will be. If so, `end` must be called after the pass.
        """
        self._pass = None
        # Most steps have nothing to wait for, and the gate nothing to learn any more.
        if self.refused or (self._expected is not None and not by_layer):
            return False
        if not self._passes_every_layer(scheduler_output):
            return False
        if self._expected is None:
            self._pass = _Pass(None)
            return False
        if by_layer:
            self._pass = _Pass(self._engine.wait_group)
        return by_layer

    def end(self) -> None:
        """After the forward pass, before anything that it computed is used.

        Raises:
            RuntimeError: a layer has not waited for its KV.
        """
        watched, self._pass = self._pass, None
        if watched is None:
            return
        if watched.wait is None:
            self._learn(watched.seen)
            return
        self._engine.wait_all_loads()  # for what comes after it: drafting layers, other streams
        missing = (self._expected or self._names) - watched.seen
        if missing:
            raise RuntimeError(
                f"kvoffload_patch: expected every attention layer to wait for its KV, found that "
                f"{_some(missing)} did not, so this step's tokens may be wrong; report it, and "
                "set KVOFFLOAD_LOAD_MODE=parked or KVOFFLOAD_DISABLE=1 until then."
            )

    def close(self) -> None:
        """Take the wrappers off."""
        self._pass = None
        while self._undo:
            delattr(*self._undo.pop())

    def _passes_every_layer(self, step: Any) -> bool:
        """Whether a step runs all layers outside a full CUDA graph, and reads KV only in them.

        One request with more tokens than a decode keeps the batch out of the graphs for decodes.
        Blocks that vLLM copies before the pass would be read there.
        """
        scheduled = step.num_scheduled_tokens
        most = max(scheduled.values()) if scheduled else 0
        return most > self._decode_tokens and not getattr(step, "kv_cache_block_copies", None)

    def _learn(self, seen: set[str]) -> None:
        missing = self._names - seen
        if missing - self._drafting:
            self._shut(f"{_some(missing - self._drafting)} computes without passing the gate")
        else:
            self._expected = frozenset(seen)

    def _shut(self, why: str) -> None:
        self.close()
        self.refused = why
        logger.info("kvoffload_patch: loads are waited for as a whole: %s.", why)

    def _stand_before(self, gated: GatedLayer) -> None:
        """Wrap what reads the layer's KV. While no pass is watched, one attribute is tested."""
        for reader in gated.readers:
            *path, method = reader.split(".")
            holder = getattr(gated.layer, path[0]) if path else gated.layer
            wrapped = getattr(holder, method, None)
            if not callable(wrapped) or method in vars(holder):
                raise _NotUnderstood(f"expected {reader} of {gated.name} as its class defines it")
            setattr(holder, method, self._wrapper(wrapped, gated.name, gated.group))
            self._undo.append((holder, method))

    def _wrapper(self, wrapped: Callable[..., Any], name: str, group: int) -> Callable[..., Any]:
        def gate(*args: Any, **kwargs: Any) -> Any:
            watched = self._pass
            if watched is not None:
                watched.seen.add(name)
                if watched.wait is not None:
                    # Each time anew: the layers need not all run on one stream.
                    watched.wait(group)
            return wrapped(*args, **kwargs)

        return gate


def find_layers(runner: Any, layout: Any, groups: Sequence[tuple[int, int]]) -> list[GatedLayer]:
    """The layers that read KV of this runner.

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
    found = []
    for name, layer in runner.vllm_config.compilation_config.static_forward_context.items():
        address = _kv_address(name, layer)
        if address is None:
            continue
        if address not in group_at:
            raise _NotUnderstood(f"the KV of {name} is none of the KV tensors")
        found.append(GatedLayer(name, layer, group_at[address], _readers(name, layer)))
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


def _kv_address(name: str, layer: Any) -> int | None:
    """Where a layer's KV begins; None if it has none."""
    cache = getattr(layer, "kv_cache", None)
    if cache is None:
        return None
    if not hasattr(cache, "data_ptr"):
        raise _NotUnderstood(f"the KV of {name} is not one tensor")
    if cache.numel():
        return int(cache.data_ptr())
    if getattr(layer, "kv_sharing_target_layer_name", None):
        raise _NotUnderstood(f"{name} shares KV that it does not show")
    return None


def _readers(name: str, layer: Any) -> tuple[str, ...]:
    kind = f"{type(layer).__module__}.{type(layer).__qualname__}"
    if kind not in _READERS:
        raise _NotUnderstood(f"{name} is a {kind}, which may read its KV anywhere")
    backend = layer.attn_backend.get_name()
    if backend not in _BACKENDS + _MLA_BACKENDS:
        raise _NotUnderstood(f"{name} has the backend {backend}, which may read its KV anywhere")
    if layer.use_direct_call or getattr(layer, "hisparse_cache", None) is not None:
        raise _NotUnderstood(f"{name} is not called as an opaque operation on its own KV")
    return _READERS[kind]


def _check_complete(runner: Any, found: Sequence[GatedLayer], addresses: set[int]) -> None:
    """Every KV tensor has a layer that was found, and every layer of vLLM's groups was."""
    unclaimed = addresses - {int(gated.layer.kv_cache.data_ptr()) for gated in found}
    if unclaimed:
        raise _NotUnderstood(f"{len(unclaimed)} KV tensors belong to no attention layer")
    named = {n for group in runner.kv_cache_config.kv_cache_groups for n in group.layer_names}
    lost = named - {gated.name for gated in found}
    if lost:
        raise _NotUnderstood(f"{_some(lost)} has KV and is not an attention layer")


def _decode_tokens(runner: Any) -> int:
    """The most tokens of a request that vLLM's graphs for decodes take."""
    known = [getattr(runner, n, 0) for n in ("uniform_decode_query_len", "decode_query_len")]
    drafted = getattr(runner.vllm_config, "num_speculative_tokens", None)
    if drafted is None:
        config = getattr(runner.vllm_config, "speculative_config", None)
        drafted = getattr(config, "num_speculative_tokens", 0) if config else 0
    return max(1 + int(drafted), *known)


def _draft_layers(runner: Any) -> frozenset[str]:
    """Layers that run after the forward pass, to propose draft tokens."""
    proposers = [getattr(runner, name, None) for name in ("drafter", "speculator")]
    names = [getattr(p, attribute, None) or () for p in proposers for attribute in _DRAFT_NAMES]
    return frozenset(name for some in names for name in some)


def _some(names: set[str] | frozenset[str]) -> str:
    first = min(names)
    return first if len(names) == 1 else f"{first} and {len(names) - 1} more"
