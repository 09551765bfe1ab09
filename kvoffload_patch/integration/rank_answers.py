"""What a rank answers when the engine asks by RPC: plain data, errors included."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankGeometry:
    """What a rank says of itself before a tier is opened. ``error``: why it cannot take part.

    A block takes ``slot_bytes`` of CPU memory. ``available_bytes`` are without the
    ``early_bytes`` that the rank has taken already.
    """

    rank: int
    host: str
    pid: int
    block_bytes: int = 0
    slot_bytes: int = 0
    num_blocks: int = 0
    device: str = ""
    available_bytes: int = 0
    early_bytes: int = 0
    error: str = ""


@dataclass(frozen=True)
class RankOpened:
    """What a rank says when its tier is open.

    Slots usable so far, whether they become more while it serves, milliseconds that a block takes
    to load, and how blocks are copied.
    """

    rank: int
    pid: int
    num_ready: int = 0
    growing: bool = False
    load_ms_per_block: float = 0.0
    copies: str = ""
    error: str = ""
