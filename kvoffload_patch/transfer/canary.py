"""The start-up check: one block is written, stored, overwritten, loaded and compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvoffload_patch.transfer.backends.base import CopyBackend, copy_now, new_streams
from kvoffload_patch.transfer.errors import CanaryFailed
from kvoffload_patch.transfer.layout import BlockLayout


def run_canary(layout: BlockLayout, backend: CopyBackend, slot: int) -> None:
    """Send random bytes through one slot and back; leaves the KV tensors as they were.

    The block is written and compared through the KV tensors themselves and moved through the
    rows, so a layout that misses bytes of a block, or moves bytes of another, is found.

    Args:
        layout: the KV tensors of this rank; none of their blocks is in use yet.
        backend: what is checked.
        slot: the CPU slot to go through.

    Raises:
        CanaryFailed: what came back is not what was written, or a neighbour block changed.
    """
    block = layout.num_backed - 1
    neighbour = max(0, block - 1)
    before = _read(layout.block_views(block)), _read(layout.block_views(neighbour))
    _write(layout.block_views(block), _random_like(before[0]))
    written = _read(layout.block_views(block))  # tensors may share bytes
    streams = new_streams(layout.device)
    copy_now(layout.device, lambda: backend.store([block], [slot], streams))
    _write(layout.block_views(block), [~part for part in written])
    copy_now(layout.device, lambda: backend.load([block], [slot], streams, compared=True))
    returned = _read(layout.block_views(block))
    beside = _read(layout.block_views(neighbour))
    _write(layout.block_views(block), before[0])
    if not _equal(returned, written):
        raise CanaryFailed("a block stored to CPU memory and loaded back has other bytes.")
    if neighbour != block and not _equal(beside, before[1]):
        raise CanaryFailed("loading one block back from CPU memory changed another block.")


def _read(views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of the views as flat bytes, on the device."""
    return [
        view.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
        for view in views
    ]


def _write(views: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
    for view, part in zip(views, parts):
        view.copy_(part.view(view.dtype).view(view.shape))


def _random_like(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    # A generator of our own: the engine's random state must not depend on the tier.
    generator = torch.Generator().manual_seed(0x6B76)
    return [
        torch.randint(0, 256, part.shape, dtype=torch.uint8, generator=generator).to(part.device)
        for part in parts
    ]


def _equal(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right))
