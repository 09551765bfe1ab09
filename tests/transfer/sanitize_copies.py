"""What scripts/sanitize runs: every backend once over every small layout, and nothing else.

Usage: python tests/transfer/sanitize_copies.py [--fault]

Compares the bytes as well. ``--fault`` only lets a kernel read a block that does not exist.
"""

from __future__ import annotations

import argparse

import torch
from transfer import layouts
from transfer.opened import Opened

from kvoffload_patch.transfer.backends.tiles import TileMover
from kvoffload_patch.transfer.layout import BlockLayout

BACKENDS = ("staged", "groups", "singles")
SOURCE, SLOTS, TARGET = [4, 2, 0, 6, 1], [0, 1, 2, 9, 7], [5, 3, 1, 0, 2]


def round_trip(layout: str, backend: str) -> None:
    """Store some blocks, load them into others."""
    setup = Opened(layouts.build(layout, device="cuda"), backend, "cuda", checked=True)
    wanted = {target: setup.wanted(source) for source, target in zip(SOURCE, TARGET)}
    setup.store(SOURCE, SLOTS)
    setup.wait()
    setup.poison(TARGET)
    setup.load(TARGET, SLOTS)
    setup.wait()
    for block in TARGET:
        if not torch.equal(setup.wanted(block), wanted[block]):
            raise SystemExit(f"error: {backend} brought other bytes ({layout}, {block}).")
    setup.close()


def read_beyond() -> None:
    """The block after the last one; so little memory is followed by nothing."""
    tensor = torch.zeros(7, 48, dtype=torch.uint8, device="cuda")
    flat = torch.zeros(64, dtype=torch.uint8, device="cuda")
    mover = TileMover(BlockLayout([tensor], 7), 48, [flat.data_ptr()])
    stream = torch.cuda.current_stream()
    mover.move(stream, True, flat, torch.tensor([7], device="cuda"), 0, 1)
    torch.cuda.synchronize()


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Copies for compute-sanitizer to watch.")
    parser.add_argument("--fault", action="store_true", help="read beyond a tensor instead")
    if parser.parse_args().fault:
        read_beyond()
        return
    layouts.GUARD = 0  # what lies beyond a tensor must be nobody's
    for layout in layouts.LAYOUTS:
        for backend in BACKENDS:
            round_trip(layout, backend)
    print(f"{len(layouts.LAYOUTS)} layouts, {len(BACKENDS)} backends: all bytes came back")


if __name__ == "__main__":
    main()
