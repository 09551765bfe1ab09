"""Models of the tier in small: which keys they are told of, and what one with `LRUPolicy` has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import compress

from kvoffload_patch.tier.tuning import MODEL_BLOCKS

# For each value of a byte whether its lowest bits, none to all, are 0.
_LOW_BITS_0 = [bytes([not byte & (1 << bits) - 1 for byte in range(256)]) for bits in range(9)]


def sample_of(slots: int, most: int = MODEL_BLOCKS) -> int:
    """One in so many keys is sampled, a power of two, so that of so many ``most`` are at most."""
    one_in = 1
    while slots > most * one_in:
        one_in *= 2
    return one_in


def sample_marks(keys: Collection[Hashable], one_in: int) -> bytes:
    """A byte for each of these: not 0 if models are told of it, as of one in so many.

    A key is always sampled, or never. vLLM's keys are hashes, of as many bytes each: theirs are
    looked at, all at once. A call of `hash` for each took four times as long.

    Args:
        keys: of bytes all of one length, or of anything else.
        one_in: a power of two.
    """
    mask = one_in - 1
    try:
        joined = b"".join(keys)  # type: ignore[arg-type]
    except TypeError:
        joined = b""
    if not joined or len(joined) != len(next(iter(keys))) * len(keys):  # type: ignore[arg-type]
        return bytes([not hash(key) & mask for key in keys])
    size = len(joined) // len(keys)
    marks = joined[::size].translate(_LOW_BITS_0[min(mask.bit_length(), 8)])
    if mask < 256 or 1 not in marks:
        return marks
    begins = [joined[at : at + min(size, 8)] for at in range(0, len(joined), size)]
    return bytes([not int.from_bytes(begin, "little") & mask for begin in begins])


def sampled(keys: Collection[Hashable], one_in: int) -> list[Hashable]:
    """Those of these that `sample_marks` marks."""
    marks = sample_marks(keys, one_in)
    return list(compress(keys, marks)) if 1 in marks else []


class KeySample:
    """Which of some keys models are told of; those looked at last are not looked at again.

    Of what a step computes both `auto` and `adaptive` want to know it, one after the other.
    """

    def __init__(self) -> None:
        self._keys: Iterable[Hashable] = ()
        self._one_in = 0
        self._sampled: list[Hashable] = []

    def look(self, keys: Collection[Hashable], one_in: int) -> Sequence[Hashable]:
        """Those of these that are sampled, one in so many: a power of two."""
        self._keys, self._one_in = keys, one_in
        self._sampled = sampled(keys, one_in)
        return self._sampled

    def of(self, keys: Collection[Hashable], one_in: int) -> Sequence[Hashable]:
        """As `look`; if it was asked for the very same object last, that has not changed since."""
        if keys is self._keys and one_in == self._one_in:
            return self._sampled
        return self.look(keys, one_in)


class RecencyModel:
    """What a tier with `LRUPolicy` would have, were it told of nothing but uses.

    Args:
        slots: one at least.

    Attributes:
        slots: as given, or as it has grown.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._order = OrderedDict[Hashable, None]()  # least recent first

    @property
    def keys(self) -> Iterable[Hashable]:
        """Those that it has."""
        return self._order.keys()

    def use(self, keys: Sequence[Hashable]) -> int:
        """These are used, or stored where they are missing; returns how many are missing.

        What is stored becomes the most recent, the last most of all.
        """
        order = self._order
        before = len(order)
        missing = [key for key in keys if key not in order]
        if len(missing) < len(keys):
            self.ended(keys)
        for key in missing:
            order[key] = None
        missed = len(order) - before
        for _ in range(len(order) - self.slots):
            order.popitem(last=False)
        return missed

    def ended(self, keys: Iterable[Hashable]) -> None:
        """A request that used these has ended: those that it has are the most recent."""
        order = self._order
        for key in keys:
            if key in order:
                order.move_to_end(key)
