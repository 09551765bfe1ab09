"""What waits: blocks for a plan that stores them, ended requests for the end of their stores."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from itertools import chain, takewhile
from typing import Any, NamedTuple

from kvoffload_patch.tier.entries import Keys
from kvoffload_patch.tier.prefixes import PrefixOrder
from kvoffload_patch.tier.tuning import TOGETHER_BLOCKS, TOGETHER_STEPS

Rests = Mapping[Hashable, Hashable] | None
IN_A_ROW: Mapping[Hashable, Hashable] = {}


class StoreQueue:
    """Blocks to be stored, by the GPU block that holds each, until a plan takes them."""

    def __init__(self) -> None:
        self._keys: dict[int, Hashable] = {}
        self._first: dict[int, Hashable] = {}  # what the GPU is about to lose
        self._steps = 0  # that the first of them has waited

    def __len__(self) -> int:
        return len(self._keys) + len(self._first)

    @property
    def waiting(self) -> bool:
        """Whether anything waits, as `waits` has said."""
        return self._steps > 0

    def waits(self) -> bool:
        """Whether what was added waits for what the next step adds; asked once a step.

        If not, `take` is to follow. What is taken together is one plan's, and one copy.
        """
        self._steps += 1
        few = 0 < len(self._keys) < TOGETHER_BLOCKS and not self._first
        return few and self._steps < TOGETHER_STEPS

    def add(self, key: Hashable, gpu_block_id: int) -> None:
        """This GPU block holds, or will hold after this step, the block of a key."""
        self._keys[gpu_block_id] = key

    def add_first(self, key: Hashable, gpu_block_id: int) -> None:
        """As `add`, and the next plan takes it, whatever its limit."""
        self._keys.pop(gpu_block_id, None)
        self._first[gpu_block_id] = key

    def hurry(self, gpu_block_ids: Sequence[int], keys: Keys) -> None:
        """The next plan takes what was added of these, whatever its limit.

        Args:
            gpu_block_ids: given in the order in which the GPU loses them.
            keys: what each of them holds.
        """
        # The first one was used least recently: it is the tail of what is stored.
        for gpu_block_id, key in zip(reversed(gpu_block_ids), reversed(keys)):
            if self._keys.get(gpu_block_id) == key:
                self.add_first(key, gpu_block_id)

    def drop(self, gpu_block_ids: Iterable[int]) -> int:
        """These GPU blocks are overwritten; returns how many of them were to be stored."""
        if not (self._keys or self._first):
            return 0
        before = len(self)
        for gpu_block_id in gpu_block_ids:
            self._keys.pop(gpu_block_id, None)
            self._first.pop(gpu_block_id, None)
        left = len(self)
        if not left:
            self._steps = 0
        return before - left

    def take(
        self, limit: int, held: Container[Hashable], storable: Callable[[int, Hashable], bool]
    ) -> tuple[dict[Hashable, int], int]:
        """What is to be stored now, and from which GPU block, and how much is lost.

        Args:
            limit: so many at most, but for those that cannot wait.
            held: keys that are not to be stored any more.
            storable: whether a GPU block still has, and will have computed after this step, a key.
        """
        taken: dict[Hashable, int] = {}
        self._steps = 0
        lost = _take(self._first, len(self._first), taken, held, storable)
        return taken, lost + _take(self._keys, limit, taken, held, storable)


def _take(
    keys: dict[int, Hashable],
    limit: int,
    taken: dict[Hashable, int],
    held: Container[Hashable],
    storable: Callable[[int, Hashable], bool],
) -> int:
    """Move what is to be stored into ``taken``, up to its limit; returns how much is lost."""
    looked_at: list[int] = []
    lost = 0
    for gpu_block_id, key in keys.items():
        if len(taken) >= limit:
            break
        looked_at.append(gpu_block_id)
        if key in held:
            continue
        if storable(gpu_block_id, key):
            taken.setdefault(key, gpu_block_id)
        else:
            lost += 1
    # Not one by one from the front: finding a dict's first item means passing what has left it.
    if len(looked_at) == len(keys):
        keys.clear()
    for gpu_block_id in looked_at if keys else ():
        del keys[gpu_block_id]
    return lost


class Ended(NamedTuple):
    """A request that has ended.

    Attributes:
        keys: that it used and stored, head first.
        together: whether in several steps, so that they are put together.
        rests: keys that do not rest on the one before them, and on which instead; None: none does.
        last_store, last_load: tickets, the last ones planned until then.
    """

    keys: Keys
    together: bool
    rests: Rests
    last_store: int
    last_load: int


class EndedRequests:
    """Keys of requests that have ended, until what was stored and loaded for them is in place.

    Attributes:
        waiting: these requests.
    """

    def __init__(self) -> None:
        self.waiting: deque[Ended] = deque()

    def add(self, ended: Ended) -> None:
        """A request has ended."""
        self.waiting.append(ended)

    def tell(
        self,
        stores_done: int,
        loads_done: int,
        find: Callable[[Keys], Sequence[Sequence[Any]]],
        order: PrefixOrder,
    ) -> None:
        """Tell of those whose copies are done.

        ``find`` gives the slot of each key, or None, in pieces; one without None may be a range.
        """
        while self.waiting:
            keys, together, rests, last_store, last_load = self.waiting[0]
            if last_store > stores_done or last_load > loads_done:
                return
            self.waiting.popleft()
            pieces = find(keys)
            if rests:
                slots = chain.from_iterable(pieces)
                _tell_groups(dict(zip(keys, slots)), together, rests, order)
                continue
            behind: list[int] = []  # of what is missing
            if pieces and not isinstance(pieces[-1], range) and None in pieces[-1]:
                *pieces, last = pieces
                missing = last.index(None)
                behind = [slot for slot in last[missing:] if slot is not None]
                pieces += [last[:missing]] if missing else []
            if rests is not None:
                order.ended_in_pieces(pieces, together)
                order.orphaned(behind[::-1])
            else:
                order.regroup([*chain.from_iterable(pieces), *behind][::-1])


def _tell_groups(
    slot_of: dict[Hashable, int | None],
    together: bool,
    rests: Mapping[Hashable, Hashable],
    order: PrefixOrder,
) -> None:
    """Tell of a request some of whose keys rest on another one, which comes before them."""
    found = {key: slot for key, slot in slot_of.items() if slot is not None}
    if together:
        order.regroup([*reversed(found.values())])
    keys = [key for key in slot_of if key not in rests]
    prefix = list(takewhile(found.__contains__, keys))
    whole = set(prefix)
    pairs = [(slot, found[rests[key]]) for key, slot in found.items() if rests.get(key) in whole]
    orphans = [slot for key, slot in found.items() if rests.get(key, key) not in whole]
    order.ended([found[key] for key in prefix], together=False)
    order.rest(pairs)
    order.orphaned(orphans[::-1])
