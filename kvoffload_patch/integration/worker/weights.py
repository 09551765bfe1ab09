"""A digest of a rank's weights, by which an engine knows whether they have changed.

Parameters and buffers are read where they lie, on the device: each word of 4 bytes is multiplied by
a number of 8 that belongs to its place, and the products of a piece are added modulo 2^64. For any
two pieces that differ, one of 2^32 choices of these numbers gives the same sum. It finds other
weights; it keeps out nobody who wants two models to look alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from kvoffload_patch.integration.worker.tuning import HOST_WEIGHT_BYTES, WEIGHT_PIECE_WORDS

_WORD = 4  # bytes


def weights_digest(model: Any) -> str:
    """The same text for the same weights; empty where comparing them would take too long.

    Waits for what the device computes, and takes the memory of two pieces on it.

    Args:
        model: a `torch.nn.Module` whose weights are in memory, none of them given back in sleep.
    """
    import torch

    found, sums, host_bytes = hashlib.sha256(), list[Any](), 0
    places: dict[int, int] = {}
    with torch.inference_mode():
        mixers = _Mixers()
        for name, tensor in _tensors(model):
            storage = tensor.untyped_storage()
            known = len(places)
            place = places.setdefault(storage.data_ptr(), known)
            shape = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
            found.update(repr((name, str(tensor.dtype), shape, place)).encode())
            if place < known or not storage.nbytes():
                continue
            host_bytes += storage.nbytes() if tensor.device.type == "cpu" else 0
            if host_bytes > HOST_WEIGHT_BYTES:
                return ""
            sums += _sums(torch.empty(0, dtype=torch.uint8, device=tensor.device), storage, mixers)
        if sums:
            together = torch.stack([value.to(sums[0].device) for value in sums]).cpu()
            found.update(together.numpy().tobytes())
    return found.hexdigest()


def _tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """What answers depend on and no step changes; the KV cache of a layer is not among it."""
    import torch

    for path, module in model.named_modules():
        # Up to some releases the scales of a quantized KV cache are plain attributes.
        plain = {name: value for name, value in vars(module).items() if "scale" in name}
        for name, value in {**module._parameters, **module._buffers, **plain}.items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}", value


def _sums(empty: Any, storage: Any, mixers: _Mixers) -> Iterator[Any]:
    """A number for each piece of a storage, on its device."""
    import torch

    raw = empty.set_(storage)
    whole = raw.numel() // _WORD * _WORD
    for words in (*raw[:whole].view(torch.int32).split(WEIGHT_PIECE_WORDS), raw[whole:]):
        if words.numel():
            yield (words * mixers.on(raw.device, words.numel())).sum()


class _Mixers:
    """An odd number for each place in a piece, the same ones on each device."""

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}

    def on(self, device: Any, count: int) -> Any:
        """The first of a device; a small model takes no time for those of a large piece."""
        made = self._made.pop(device, None)
        if made is None or made.numel() < count:
            made = None  # its memory is free before more is taken
            made = self._make(device, min(1 << (count - 1).bit_length(), WEIGHT_PIECE_WORDS))
        self._made[device] = made
        return made[:count]

    def _make(self, device: Any, count: int) -> Any:
        import torch

        # The finalizer of SplitMix64, so that neighbours have nothing in common.
        number = torch.arange(1, count + 1, dtype=torch.int64, device=device)
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
            number.bitwise_xor_(number >> shift).mul_(factor)
        return number.bitwise_or_(1)
