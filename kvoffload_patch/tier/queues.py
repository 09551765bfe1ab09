"""What waits: blocks for a plan that stores them, ended requests for the end of their stores."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from itertools import chain, takewhile
from typing import Any, NamedTuple, Optional

from kvoffload_patch.tier.entries import Blocks, Keys, Storable
from kvoffload_patch.tier.prefixes import PrefixOrder
from kvoffload_patch.tier.tuning import TOGETHER_BLOCKS, TOGETHER_STEPS

Rests = Optional[Mapping[Hashable, Hashable]]
IN_A_ROW: Mapping[Hashable, Hashable] = {}


class StoreQueue:
    """Blocks to be stored, by the GPU block that holds each, until a plan takes them."""

    def __init__(self) -> None:
        self._keys: dict[int, Hashable] = {}
        self._first: dict[int, Hashable] = {}  # what the GPU is about to lose

    def __len__(self) -> int:
        return len(self._keys) + len(self._first)

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

    def drop(self, gpu_block_ids: Sequence[int]) -> list[int]:
        """These GPU blocks are overwritten; returns those of them that were to be stored."""
        if not (self._keys or self._first):  # as in most steps
            return []
        return _drop(self._keys, gpu_block_ids) + _drop(self._first, gpu_block_ids)

    def clear(self) -> None:
        """Nothing is to be stored."""
        self._keys.clear()
        self._first.clear()

    def take(
        self, limit: int, held: Container[Hashable], storable: Storable
    ) -> tuple[dict[Hashable, int], int]:
        """What is to be stored now, and from which GPU block, and how much is lost.

        Args:
            limit: so many at most, but for those that cannot wait.
            held: keys that are not to be stored any more.
            storable: of what was added.
        """
        taken: dict[Hashable, int] = {}
        lost = _take(self._first, len(self._first), taken, held, storable)
        return taken, lost + _take(self._keys, limit, taken, held, storable)


class WaitingBlocks(dict[int, Hashable]):
    """What some steps have computed, by GPU block, until enough of it is stored by one plan.

    Each step asks several times whether there is any: of a dict that takes no call.
    """

    def __init__(self) -> None:
        super().__init__()
        self._steps = 0  # that the first of them has waited

    def add(self, computed: Blocks) -> bool:
        """Add what a step computes; returns whether all of it waits for what the next one does.

        If not, `take` is to follow. What is taken together is one plan's, and one copy.
        """
        self.update(zip(computed.values(), computed))
        self._steps += bool(self)
        return 0 < len(self) < TOGETHER_BLOCKS and self._steps < TOGETHER_STEPS

    def drop(self, gpu_block_ids: Sequence[int]) -> list[int]:
        """As `StoreQueue.drop`."""
        dropped = _drop(self, gpu_block_ids)
        if not self:
            self._steps = 0
        return dropped

    def clear(self) -> None:
        """Nothing waits."""
        super().clear()
        self._steps = 0

    def take(self, storable: Storable) -> tuple[dict[Hashable, int], int]:
        """As `StoreQueue.take`, all of it, whether it is held by now or not."""
        taken = [(key, block) for block, key in self.items() if storable(block, key)]
        lost = len(self) - len(taken)
        self.clear()
        return dict(taken), lost


def _drop(keys: dict[int, Hashable], gpu_block_ids: Sequence[int]) -> list[int]:
    """Forget what is overwritten; returns which of these that is. Mostly none of them."""
    if not keys or keys.keys().isdisjoint(gpu_block_ids):
        return []
    return [block for block in gpu_block_ids if keys.pop(block, None) is not None]


def _take(
    keys: dict[int, Hashable],
    limit: int,
    taken: dict[Hashable, int],
    held: Container[Hashable],
    storable: Storable,
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


def tell_ended(
    ended: deque[Ended],
    stores_done: int,
    loads_done: int,
    find: Callable[[Keys], Sequence[Sequence[Any]]],
    order: PrefixOrder,
) -> None:
    """Tell of those requests whose copies are done: what was stored and loaded is in place.

    ``find`` gives the slot of each key, or None, in pieces; one without None may be a range.
    """
    while ended:
        keys, together, rests, last_store, last_load = ended[0]
        if last_store > stores_done or last_load > loads_done:
            return
        ended.popleft()
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
            order.ended(pieces, together)
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
    order.ended([[found[key] for key in prefix]] if prefix else [], together=False)
    order.rest(pairs)
    order.orphaned(orphans[::-1])
