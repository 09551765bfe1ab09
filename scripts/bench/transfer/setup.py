"""What `bench transfer` moves: KV tensors of a named shape, CPU slots, what goes where."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from kvoffload_patch.links import LOAD, STORE
from kvoffload_patch.plan import Transfer, TransferPlan
from kvoffload_patch.transfer.backends.choose import choose_backend
from kvoffload_patch.transfer.backends.slots import SlotMemory
from kvoffload_patch.transfer.engine import CopyEngine
from kvoffload_patch.transfer.integrity import FULL
from kvoffload_patch.transfer.layout import BlockLayout
from kvoffload_patch.transfer.memory.host_buffer import HostBuffer
from scripts.bench.common import GIB
from scripts.bench.transfer.report import DEFAULT, named
from scripts.bench.transfer.shapes import SHAPES

ORDERS = ("contiguous", "fragmented")
POISON = 0xA5


class Slots:
    """CPU memory for all block sizes: registered once, seen as slots of a size.

    Args:
        nbytes: bytes of all slots; a multiple of ``largest``.
        largest: block bytes that all others divide.
    """

    def __init__(self, nbytes: int, largest: int, device: torch.device) -> None:
        self._largest = largest
        self._host = HostBuffer(nbytes // largest, largest, device)
        self._host.wait_ready(nbytes // largest)
        noise = torch.randint(0, 256, (largest,), dtype=torch.uint8, device=device)
        for slot in self._host.slots:  # zeros would not be what real copies move
            slot.copy_(noise)

    def of(self, block_bytes: int) -> SlotMemory:
        """Slots of this size."""
        view = self._host.slots.view(-1, block_bytes)
        return SlotMemory(view, self._host.slots_per_piece * (self._largest // block_bytes))

    def close(self) -> None:
        """Give the memory back."""
        self._host.close()


class KV:
    """KV tensors, one a layer, filled with random bytes.

    Args:
        kind: the name of a shape.
        block_bytes: of the tokens of a block.

    Attributes:
        tensors: one a layer, as `Shape.of_layer` says.
        dim: the dimension that counts blocks.
    """

    def __init__(self, kind: str, block_bytes: int, num_blocks: int, device: torch.device) -> None:
        shape = SHAPES[kind]
        self.dim = shape.block_dim
        size = shape.of_layer(num_blocks, block_bytes // shape.token_bytes)
        self.tensors = [
            torch.empty(size, dtype=shape.dtype, device=device) for _ in range(shape.layers)
        ]
        for tensor in self.tensors:
            words = tensor.view(torch.int64)  # bytes, whatever numbers they are
            torch.randint(-(1 << 63), (1 << 63) - 1, words.shape, out=words)
        self.layout = BlockLayout(self.tensors, num_blocks, self.dim)
        assert self.layout.block_bytes == block_bytes

    def copy_of(self, layer: int) -> torch.Tensor:
        """One layer's bytes, as integers that compare as bytes do."""
        return self.tensors[layer].view(torch.int16).clone()


@dataclass(frozen=True)
class Ways:
    """Which blocks and slots move: disjoint for the two directions, so that both can at once."""

    store_blocks: tuple[int, ...]
    store_slots: tuple[int, ...]
    load_blocks: tuple[int, ...]
    load_slots: tuple[int, ...]


def ways(order: str, count: int) -> Ways:
    """``count`` blocks each way; needs ``2 * count`` blocks and ``4 * count`` slots.

    GPU blocks are scattered in both orders, as they are in a cache in use. Slots are neighbours in
    ascending order, or every other slot in random order: then no two of a batch are neighbours.
    """
    source = random.Random(count)
    blocks = list(range(2 * count))
    source.shuffle(blocks)
    slots = []
    for first in (0, 2 * count):
        if order == "contiguous":
            slots.append(list(range(first, first + count)))
        else:
            slots.append(list(range(first, first + 2 * count, 2)))
            source.shuffle(slots[-1])
    return Ways(tuple(blocks[:count]), tuple(slots[0]), tuple(blocks[count:]), tuple(slots[1]))


class Mover:
    """A copy engine over one backend; makes the plans.

    Attributes:
        name: of the backend, and of its checksums where these are not the default.
        report: what the backend says of itself.
    """

    def __init__(self, kv: KV, slots: SlotMemory, choice: str, integrity: str = DEFAULT) -> None:
        chosen = choose_backend(kv.layout, slots, slots.slots.shape[0], choice, integrity)
        self.name, self.report = named(chosen.backend.name, integrity), chosen.report
        self.engine = CopyEngine(kv.layout, chosen.backend)
        self._compared = integrity == FULL
        self._loads = self._stores = 0

    def plan(self, kind: str, moves: Ways) -> TransferPlan:
        """The next plan: ``store``, ``load`` (beside the step), ``inline`` load, or ``both``."""
        loads: tuple[Transfer, ...] = ()
        stores: tuple[Transfer, ...] = ()
        done = (LOAD, self._loads), (STORE, self._stores)
        if kind != "store":
            self._loads += 1
            moved = moves.load_slots, moves.load_blocks
            loads = (Transfer(self._loads, *LOAD, *moved, self._compared),)
        if kind in ("store", "both"):
            self._stores += 1
            stores = (Transfer(self._stores, *STORE, moves.store_blocks, moves.store_slots),)
        waits = ((LOAD, self._loads),) if kind == "inline" else ()
        return TransferPlan(loads, stores, waits, done)

    def done(self) -> bool:
        """Whether every plan so far is carried out.

        Raises:
            RuntimeError: a copy has failed.
        """
        progress: Any = self.engine.poll()
        if progress.failed:
            raise RuntimeError(f"copies failed: {progress}")
        return bool(progress.done == ((LOAD, self._loads), (STORE, self._stores)))


def check_bytes(kv: KV, slots: SlotMemory, mover: Mover, order: str, count: int) -> None:
    """Store random blocks, poison, load them elsewhere, and compare every byte of the cache.

    Raises:
        RuntimeError: a byte is not what it must be, in the cache or in a slot between.
    """
    moves = ways(order, count)
    touched = slots.slots[: 2 * count]
    touched.fill_(POISON)
    before = [kv.copy_of(layer) for layer in range(len(kv.tensors))]
    away = torch.tensor(moves.store_blocks, device=kv.layout.device)
    target = torch.tensor(moves.load_blocks, device=kv.layout.device)
    _carry_out(mover, mover.plan("store", moves))
    between = sorted(set(range(2 * count)) - set(moves.store_slots))
    if not bool((touched[torch.tensor(between)] == POISON).all()):
        raise RuntimeError(f"{mover.name}, {order}: a store wrote into a slot that is not its own")
    for tensor in kv.tensors:
        tensor.view(torch.int16).index_fill_(kv.dim, target, -1)
    back = Ways((), (), moves.load_blocks, moves.store_slots)
    _carry_out(mover, mover.plan("load", back))
    for layer, tensor in enumerate(kv.tensors):
        expected = before[layer]
        expected.index_copy_(kv.dim, target, expected.index_select(kv.dim, away))
        if not torch.equal(expected, tensor.view(torch.int16)):
            raise RuntimeError(f"{mover.name}, {order}: layer {layer} has other bytes than before")


def fill(mover: Mover, moves: Ways) -> None:
    """Store what is going to be loaded, so that it has checksums."""
    back = Ways(moves.load_blocks, moves.load_slots, (), ())
    _carry_out(mover, mover.plan("store", back))


def _carry_out(mover: Mover, plan: TransferPlan) -> None:
    mover.engine.begin_step(plan)
    mover.engine.end_step()
    mover.engine.drain()
    if not mover.done():
        raise RuntimeError("expected a drained engine to be done")


def blocks_in(gib: float, block_bytes: int) -> int:
    """Blocks of this size in so many GiB."""
    return max(1, int(gib * GIB) // block_bytes)
