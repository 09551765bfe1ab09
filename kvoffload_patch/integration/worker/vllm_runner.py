"""What the tier reads of vLLM's worker side: model runners V1 and V2, tensors and outputs."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from kvoffload_patch.integration import kvcached
from kvoffload_patch.integration.protocol import RESULT
from kvoffload_patch.plan import TransferResult


def runner_is_patched(runner: Any) -> str:
    """Why plans would not be carried out by this runner; empty if they will be, from now on.

    A class that a reload has made is another than the one that was patched under its name.
    """
    from kvoffload_patch.integration.install import installed, keep_installed

    refused = keep_installed()
    if refused:
        return refused
    patched = installed()
    for method in ("execute_model", "sample_tokens"):
        owner = next((c for c in type(runner).__mro__ if method in vars(c)), None)
        if owner is None and method == "sample_tokens":
            continue  # up to 0.11.0 execute_model samples
        if (owner, method) not in patched:
            name = f"{owner.__module__}.{owner.__qualname__}.{method}" if owner else method
            return (
                f"expected {method} of {type(runner).__name__} to be patched, found {name} as "
                "vLLM made it, so this worker did not see the switch when it started, or loaded "
                "its module once more since (start vLLM through kvoffload_patch on every host)"
            )
    return ""


def kv_tensors(runner: Any) -> tuple[list[Any], int | None]:
    """The KV tensors, and the dimension that counts blocks where the release fixes it.

    From 0.29 on all layers are views ``[block, head, token, content]`` of one allocation;
    earlier the backend decides the shape, and the dimension is found by its size, and a layer that
    keeps states has a list of them. Up to 0.14 the runner's list has one layer of each index, so
    that the indexers of DeepSeek-V3.2 are not in it: what it leaves out comes behind it.
    """
    import torch

    tensors = _flat(runner.kv_caches)
    tensors += _left_out(runner, tensors)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"KV layout not understood: expected a tensor for each layer, found "
                f"{type(tensor).__name__}; set KVOFFLOAD_STRICT=0 to serve without the CPU tier"
            )
    placed = runner.kv_cache_config.kv_cache_tensors
    one_allocation = bool(placed) and hasattr(placed[0], "layer_stride")
    return tensors, 0 if one_allocation else None


def first_pointer(runner: Any) -> int | None:
    """Where the first KV tensor begins; None if there is none.

    Asked once a step: whether the tensors were replaced, the first one says for all.
    """
    tensors = runner.kv_caches
    if not tensors:
        return None
    pointer: int = _parts(tensors[0])[0].data_ptr()
    return pointer


def _flat(caches: Any) -> list[Any]:
    return [part for layer in caches for part in _parts(layer)]


def _left_out(runner: Any, listed: Sequence[Any]) -> list[Any]:
    """KV tensors of layers in the KV cache groups that are not in the runner's list."""
    known = {tensor.data_ptr() for tensor in listed if hasattr(tensor, "data_ptr")}
    left = []
    groups = runner.kv_cache_config.kv_cache_groups
    for name in [name for group in groups for name in group.layer_names]:
        layers = runner.vllm_config.compilation_config.static_forward_context
        held = getattr(layers.get(name), "kv_cache", ())  # other stages' layers are not here
        for tensor in _tensors(held):
            if tensor.numel() and tensor.data_ptr() not in known:
                known.add(tensor.data_ptr())
                left.append(tensor)
    return left


def _tensors(held: Any) -> Iterator[Any]:
    """A layer's tensors: one, a list with one for each stage that runs it, or with all states."""
    if isinstance(held, (tuple, list)):
        for one in held:
            yield from _tensors(one)
    elif hasattr(held, "data_ptr"):
        yield held


def _parts(layer: Any) -> Sequence[Any]:
    """A layer's K and V are one tensor in vLLM, a tuple in vllm-ascend; its states are a list."""
    return layer if isinstance(layer, (tuple, list)) else (layer,)


def compute_into_no_block(runner: Any) -> None:
    """Of a step without tokens: nor does a batch that follows it for the sake of other engines.

    From 0.15 to 0.19 runner V1 has such a batch write where the last step's first token went, and
    that block may be another's by now: a load's. A step with tokens says where they go.
    """
    if not hasattr(runner, "_get_slot_mappings"):
        return
    if runner.vllm_config.parallel_config.data_parallel_size > 1:
        for table in runner.input_batch.block_table.block_tables:
            slots = getattr(table.slot_mapping, "gpu", None)  # of vLLM's own tables
            if slots is not None:
                slots.fill_(-1)


def copy_output(output: Any, result: TransferResult) -> Any:
    """The runner's output with the result on it.

    An asynchronous output carries the real one inside. vLLM answers steps without tokens with
    one shared object, so such an output is copied before it is written to.
    """
    for inner in ("_model_runner_output", "model_runner_output"):
        carried = getattr(output, inner, None)
        if carried is not None:
            setattr(carried, RESULT, result)
            return output
    if not hasattr(output, "sampled_token_ids"):
        return output  # None or IntermediateTensors: not the rank that answers
    if not output.req_ids:
        output = copy.copy(output)
    setattr(output, RESULT, result)
    return output


def block_layout(runner: Any) -> Any:
    """The `BlockLayout` of the runner's KV tensors.

    Raises:
        TransferError: it is not understood.
    """
    from kvoffload_patch.transfer.layout import BlockLayout, layout_by_bytes

    tensors, block_dim = kv_tensors(runner)
    if kvcached.has_tensors():
        # They are made for the whole GPU: they have more blocks than vLLM's configuration says.
        # Before the first request only those of the null block's page have memory.
        nbytes = int(runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.page_size_bytes)
        return layout_by_bytes(tensors, nbytes, max(1, kvcached.page_bytes() // nbytes))
    return BlockLayout(tensors, runner.kv_cache_config.num_blocks, block_dim)
