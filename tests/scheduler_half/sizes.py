"""How many tokens the blocks of a KV cache group have, and a hash."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

from scheduler_half.states import KINDS

BLOCK = 16


class Wide(int):
    """In the place of a group's window: full attention, whose blocks have so many tokens."""


class Replicated(int):
    """In the place of a group's window: full attention, which no ranks divide between them.

    As that of a drafting model beside one that they do: its blocks have so many tokens.
    """


def group_size(window: Any, shards: int) -> int:
    """Tokens of a group's blocks: of a state and a window no ranks have a part each."""
    if isinstance(window, (Wide, Replicated)):
        return int(window)
    return BLOCK * shards if window is None else BLOCK


def hash_size(windows: Sequence[Any], shards: int) -> int:
    """Tokens that vLLM hashes at once, unless it is told otherwise."""
    if any(window in KINDS or isinstance(window, Replicated) for window in windows):
        return gcd(*(group_size(window, shards) for window in windows))
    return BLOCK * shards
