"""Which block of a prefix rests on which, where vLLM has several KV cache groups."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

_HASH, _GROUP = b"hash", 3
_SUFFIX = slice(-4, None)  # of a key of bytes: its group


class PrefixGroups:
    """Puts the keys of a request in order: block after block of the first group of full attention.

    A hit needs all of its blocks; of the others, a window or a state, those where it ends. So each
    of these rests on the block of that group that ends where it ends, which has the same hash.

    Args:
        key: makes a key of a hash and the number of a group.
        managers: vLLM's own, one for each group.

    Attributes:
        first: that group; None where there is none, or keys are made otherwise.
    """

    def __init__(self, key: Callable[[Any, int], Hashable], managers: Sequence[Any]) -> None:
        names = [type(manager).__name__ for manager in managers]
        known = "FullAttentionManager" in names and split(key(_HASH, _GROUP)) == (_HASH, _GROUP)
        self.first = names.index("FullAttentionManager") if known else None

    def in_order(
        self, keys: Iterable[Hashable]
    ) -> tuple[list[Hashable], dict[Hashable, Hashable] | None]:
        """The keys, head first, and of those of other groups the one that each rests on.

        Not in order, and None, where that is not known: without such a group, and where any block
        does not end with one of it, as where groups have blocks of different sizes.
        """
        if self.first is None:
            return list(keys), None
        given, first, others = list(keys), dict[Hashable, Hashable](), dict[Hashable, list[Any]]()
        for key in given:
            made_of, group = split(key)
            if group == self.first:
                first[made_of] = key
            else:
                others.setdefault(made_of, []).append(key)
        if not others.keys() <= first.keys():
            return given, None
        ordered: list[Hashable] = []
        rests: dict[Hashable, Hashable] = {}
        for made_of, key in first.items():
            ordered.append(key)
            for other in others.get(made_of, ()):
                ordered.append(other)
                rests[other] = key
        return ordered, rests


def split(key: Any) -> tuple[Hashable, int]:
    """The hash and the group that a key is made of: a named tuple, or bytes with the group last."""
    if isinstance(key, tuple):
        return key[0], key[1]
    return key[: _SUFFIX.start], int.from_bytes(key[_SUFFIX], "big")
