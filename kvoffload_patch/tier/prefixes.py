"""The tail of a prefix leaves the tier before its head, whatever the eviction policy chooses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Sequence
from itertools import compress
from operator import ne

from kvoffload_patch.tier.policy import EvictionPolicy, PolicyBroken
from kvoffload_patch.tier.tuning import NEIGHBOUR_BLOCKS

NONE = -1  # no slot


class PrefixOrder:
    """An eviction policy that asks another one, and lets nothing leave before what rests on it.

    It is told the prefix of each request that has ended. A block of it that the other policy gives
    up is due: all that rests on it leaves first, from the tail, and then the block itself, unless
    it is used again before. What rests on a block is worth nothing without it, and every use of it
    was a use of that block, too.

    Every block has one block before it and any number behind it, of which one is kept in a list;
    two lists that name each other are a link, anything else is none. So what left the tier needs
    no more than that it names nobody.

    Args:
        policy: chooses what leaves.
        key_of: of each slot, kept up to date.
        evictable: whether a slot is neither being written nor pinned.
        num_pinned: how many of these slots are pinned.

    Attributes:
        policy: as given; another may take its place while it has nothing.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        key_of: Sequence[Hashable],
        evictable: Callable[[int], bool],
        num_pinned: Callable[[Sequence[int]], int],
    ) -> None:
        self.policy = policy
        self._key_of = key_of
        self._evictable = evictable
        self._num_pinned = num_pinned
        self._before = [NONE] * len(key_of)
        self._behind = [NONE] * len(key_of)
        self._numbers = list(range(len(key_of)))  # slots as the same objects: soon compared
        self._others_behind: dict[int, set[int]] = {}  # where prefixes part
        self._due: OrderedDict[int, None] = OrderedDict()
        self._path: list[int] = []  # from the first that is due towards a tail

    def take_all(self) -> list[int]:
        """All that can leave, in that order; the policy has none of it any more."""
        in_order = [*self._due, *self._give_up(len(self._before))]
        self._due.clear()
        self._path.clear()
        return in_order

    def shrink(self, num_slots: int) -> None:
        """There are so many slots left; what rests on others rests on nothing. O(slots).

        Neither the policy nor anything here has any of them in an order, as after `take_all`.
        """
        del self._before[num_slots:], self._behind[num_slots:], self._numbers[num_slots:]
        self._before = [slot if slot < num_slots else NONE for slot in self._before]
        self._behind = [slot if slot < num_slots else NONE for slot in self._behind]
        self._others_behind = {
            head: {tail for tail in tails if tail < num_slots}
            for head, tails in self._others_behind.items()
            if head < num_slots
        }

    def orphaned(self, slots: Sequence[int]) -> None:
        """What these rest on has left, or never came: they leave next, in this order."""
        if not slots:
            return
        idle, due = list(filter(self._evictable, slots)), self._due
        self.policy.remove([slot for slot in idle if slot not in due])
        self._path.clear()
        for slot in reversed(idle):
            due[slot] = None
            due.move_to_end(slot, last=False)

    def ended(self, pieces: Sequence[Sequence[int]], together: bool) -> None:
        """A request has ended that used these: all of its prefix that the tier has, head first.

        Args:
            pieces: none of them empty, each slot once; one of neighbours may be a range.
            together: whether to put them together; otherwise they came all at once.
        """
        if together:
            self.regroup([slot for piece in reversed(pieces) for slot in reversed(piece)])
        head = NONE
        for piece in pieces:
            first = piece[0]
            if head == NONE:
                self._before[first] = NONE  # so that no block comes to rest on itself
            elif self._before[first] != head:
                self._link(first, head)
            if not self._link_run(piece):
                self._link_each(piece)
            head = piece[-1]

    def rest(self, pairs: Iterable[tuple[int, int]]) -> None:
        """The first of each two rests on the other, and nothing on it."""
        for tail, head in pairs:
            if self._before[tail] != head:
                self._link(tail, head)

    def forget(self, slots: Sequence[int]) -> None:
        """The keys of these are gone; what rests on them rests on nothing from now on."""
        self._path.clear()
        for slot in slots:
            self._due.pop(slot, None)
            while (tail := self._one_behind(slot)) != NONE:
                self._before[tail] = NONE
            self._leave(slot)

    # As an eviction policy

    def grow(self) -> None:
        more = [NONE] * (len(self._key_of) - len(self._before))
        self._before += more
        self._behind += more
        self._numbers += range(len(self._numbers), len(self._key_of))
        self.policy.grow()

    def miss(self, keys: Collection[Hashable]) -> None:
        self.policy.miss(keys)

    def insert(self, slots: Sequence[int]) -> None:
        self.policy.insert(slots)

    def hit(self, slots: Sequence[int]) -> None:
        if self._due:
            self._give_back(slots)
        self.policy.hit(slots)

    def regroup(self, slots: Sequence[int]) -> None:
        if self._due:
            self._give_back(slots)
        self.policy.regroup(slots)

    def pin(self, slots: Sequence[int]) -> None:
        if self._due:
            self._give_back(slots)
        self.policy.pin(slots)

    def unpin(self, slots: Sequence[int]) -> None:
        self.policy.unpin(slots)

    def remove(self, slots: Sequence[int]) -> None:
        self.forget(slots)
        self.policy.remove(slots)

    def evict(self, count: int) -> Sequence[int]:
        if not self._due:
            slots = self._give_up(count)
            runs = runs_of(sorted(slots))  # mostly of few prefixes, or of their ends
            if self._is_closed(slots, runs):
                self._clear(slots, runs)
                return slots
            self._due.update(dict.fromkeys(slots))
        return self._evict_due(count)

    # Inside

    def _give_up(self, count: int) -> Sequence[int]:
        """What the policy gives up: a load of a pinned slot would bring what comes in its place."""
        slots = self.policy.evict(count)
        pinned = self._num_pinned(slots)
        if pinned or len(slots) > count:
            raise PolicyBroken(self.policy, f"{len(slots)} of {count}, {pinned} of them pinned")
        return slots

    def _evict_due(self, count: int) -> list[int]:
        """What is due, from its tails, and then what the policy gives up besides."""
        chosen: list[int] = []
        held: list[int] = []
        due = self._due
        while len(chosen) < count:
            if not due:
                due.update(dict.fromkeys(self._give_up(count - len(chosen))))
                if not due:
                    break
            slot = self._next_tail()
            if slot in due:
                del due[slot]
            elif self._evictable(slot):
                self.policy.remove((slot,))
            else:  # and so is all that it rests on
                held += [other for other in self._path if other in due]
                for other in held:
                    due.pop(other, None)
                self._path.clear()
                continue
            self._leave(slot)
            chosen.append(slot)
        if held:
            self.policy.insert(held)
        return chosen

    def _next_tail(self) -> int:
        """A slot on which nothing rests, behind the first that is due, or that itself.

        Raises:
            RuntimeError: there is none. It ends what would go on for ever, and holds the step up.
        """
        path = self._path
        if not path:
            path.append(next(iter(self._due)))
        while (tail := self._one_behind(path[-1])) != NONE:
            path.append(tail)
            if len(path) > len(self._before):
                raise RuntimeError(f"the block in slot {tail} rests on itself")
        return path.pop()

    def _is_closed(self, slots: Sequence[int], runs: Sequence[range]) -> bool:
        """Whether nothing but these rests on any of them; ``runs`` are all of them, or none."""
        before, behind = self._before, self._behind
        if self._others_behind and not self._others_behind.keys().isdisjoint(slots):
            return False
        heads: list[int] = []  # of what is not known to rest on one of these
        for run in runs:
            first, last = run[0], run[-1]
            inside = behind[first:last] == self._numbers[first + 1 : last + 1]
            heads += (last,) if inside else run
        if not runs:
            # Mostly each rests on the next.
            found = map(behind.__getitem__, slots)
            heads = list(compress(slots, map(ne, found, (NONE, *slots))))
        tails = [behind[head] for head in heads]
        open_ends = [t for t, head in zip(tails, heads) if t != NONE and before[t] == head]
        # Mostly the few that lead from one run to the next.
        few = bool(runs) and len(open_ends) < NEIGHBOUR_BLOCKS
        among: Sequence[Container[int]] = runs if few else [set(slots)]
        return all(any(tail in some for some in among) for tail in open_ends)

    def _link_run(self, slots: Sequence[int]) -> bool:
        """Each of these rests on the one before it, its neighbour; False if there is more to do."""
        if not isinstance(slots, range):
            return False
        before, behind = self._before, self._behind
        first, last = slots[0], slots[-1]
        own, next_ones = self._numbers[first:last], self._numbers[first + 1 : last + 1]
        heads, tails = before[first + 1 : last + 1], behind[first:last]
        if heads == own and tails == next_ones:
            return True  # they did already
        none = [NONE] * (last - first)
        if heads != none or tails != none:
            return False
        before[first + 1 : last + 1] = own
        behind[first:last] = next_ones
        return True

    def _link_each(self, slots: Sequence[int]) -> None:
        before, behind = self._before, self._behind
        tails = slots[1:]
        linked = map(before.__getitem__, tails)
        for head, tail in compress(zip(slots, tails), map(ne, linked, slots)):
            if behind[head] == NONE:
                before[tail], behind[head] = head, tail
            else:
                self._link(tail, head)

    def _one_behind(self, slot: int) -> int:
        """A slot that rests on this one; NONE if there is none."""
        tail = self._behind[slot]
        if tail != NONE and self._before[tail] == slot:
            return tail
        others = self._others_behind.get(slot, ())
        while others:
            tail = others.pop()
            if self._before[tail] == slot:
                self._behind[slot] = tail
                return tail
        self._others_behind.pop(slot, None)
        return NONE

    def _link(self, tail: int, head: int) -> None:
        other = self._behind[head]
        if other not in (NONE, tail) and self._before[other] == head:
            others = self._others_behind.setdefault(head, set())
            others.add(other)
            if not len(others) & (len(others) - 1):  # looked at whenever they have doubled
                others.intersection_update([one for one in others if self._before[one] == head])
        self._before[tail], self._behind[head] = head, tail

    def _clear(self, slots: Sequence[int], runs: Sequence[range]) -> None:
        """These leave, and nothing else rests on them."""
        before, behind = self._before, self._behind
        for run in runs:
            begin, end = run[0], run[-1] + 1
            before[begin:end] = behind[begin:end] = [NONE] * len(run)
        if not runs:
            for slot in slots:
                before[slot] = behind[slot] = NONE

    def _leave(self, slot: int) -> None:
        self._before[slot] = self._behind[slot] = NONE

    def _give_back(self, slots: Sequence[int]) -> None:
        """Those of these that are due are used again."""
        again = [slot for slot in dict.fromkeys(slots) if slot in self._due]
        if again:
            self._path.clear()
            for slot in again:
                del self._due[slot]
            self.policy.insert(again)


def runs_of(slots: Sequence[int]) -> list[range]:
    """Slots, ascending and each once, as runs of neighbours; none if they are many short ones."""
    runs: list[range] = []
    begin, last = 0, len(slots) - 1
    while begin <= last:
        if NEIGHBOUR_BLOCKS * len(runs) > last:
            return []
        # Up to the last one that is as far from the first as it is behind it.
        end, beyond = begin, last + 1
        ahead = slots[begin] - begin
        if slots[last] - last == ahead:
            end = last
        while beyond - end > 1 and end < last:
            middle = (end + beyond) // 2
            if slots[middle] - middle == ahead:
                end = middle
            else:
                beyond = middle
        runs.append(range(slots[begin], slots[end] + 1))
        begin = end + 1
    return runs
