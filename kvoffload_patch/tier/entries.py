"""What the tier keeps of each transfer under way, of each link, and of slots that are held."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

from kvoffload_patch.links import Link, Tickets

Keys = Sequence[Hashable]
Slots = Sequence[int]
Blocks = Mapping[Hashable, int]  # GPU blocks, by the key of what each holds
# Whether a GPU block still has, and will have computed after this step, the block of a key.
Storable = Callable[[int, Hashable], bool]


class LinkTickets:
    """The tickets of one link, which are done in their order.

    Attributes:
        last: the last one given out.
        done: the last one known to be done.
        wait: what the next plan's forward pass waits for.
        waited: what that of a plan was told to wait for last.
        failed: why those failed that did, until a plan says that they are done.
        under_way: those not known to be done, with the keys and slots of each.
    """

    __slots__ = ("done", "failed", "last", "link", "under_way", "wait", "waited")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.last = self.done = self.wait = self.waited = 0
        self.failed: dict[int, str] = {}
        self.under_way: deque[tuple[int, Keys, Slots]] = deque()

    def give_out(self, keys: Keys, slots: Slots) -> int:
        """The next ticket, for a transfer of these keys, each from or to its slot."""
        self.last += 1
        self.under_way.append((self.last, keys, slots))
        return self.last

    def wait_for(self, ticket: int) -> None:
        """The next plan's forward pass waits for this ticket and those before it."""
        if ticket > self.wait:
            self.wait = ticket

    def note_failed(self, ticket: int, reason: str) -> None:
        """A transfer failed; one that is known to be done was taken in then."""
        if ticket > self.done:  # otherwise it is named until a plan shows that
            self.failed[ticket] = reason

    def take_done(self, done: int) -> Iterator[tuple[int, Keys, Slots]]:
        """All up to a ticket are done: those not known to be; `done` is as it was until the end."""
        while self.under_way and self.under_way[0][0] <= done:
            yield self.under_way.popleft()
        self.done = max(self.done, min(done, self.last))

    def forget_failed(self) -> None:
        """A plan was made, with what is known to be done."""
        self.failed = {t: why for t, why in self.failed.items() if t > self.done}


def take_tickets(links: Iterable[LinkTickets]) -> tuple[Tickets, Tickets]:
    """What the next plan's forward pass waits for, once, and what is known to be done, by link."""
    waits: Tickets = ()
    done: Tickets = ()
    for link in links:
        if link.wait:
            waits += ((link.link, link.wait),)
            link.waited = max(link.waited, link.wait)
            link.wait = 0
        if link.done:
            done += ((link.link, link.done),)
    return waits, done


class HeldSlots:
    """Slots that transfers under way use, as far as that is not said by a key's slot alone.

    A slot is written by one transfer at most, and then nothing else uses it. It may be read by
    several. When its key is forgotten meanwhile, it belongs to no key until the last is done.

    Attributes:
        forgotten: slots in use whose key is gone.
    """

    def __init__(self) -> None:
        self._read: set[int] = set()
        self._read_again: dict[int, int] = {}  # how many read it besides the first
        self.forgotten: set[int] = set()

    def read(self, slots: Slots) -> None:
        """A transfer reads these slots from now on."""
        again = self._read.intersection(slots)
        if again or len(set(slots)) < len(slots):
            for slot in slots:
                if slot in self._read:
                    self._read_again[slot] = self._read_again.get(slot, 0) + 1
                self._read.add(slot)
        else:
            self._read.update(slots)

    def is_read(self, slot: int) -> bool:
        """Whether a transfer reads a slot."""
        return slot in self._read

    def reads_of(self, slots: Slots) -> int:
        """How many of these slots transfers read."""
        # Mostly nothing is read: then these are not even walked.
        if not self._read or self._read.isdisjoint(slots):
            return 0
        return len(self._read.intersection(slots))

    def pinned(self) -> list[int]:
        """Slots that a transfer reads and whose keys are known."""
        return list(self._read - self.forgotten)

    def end_read(self, keys: Keys, slots: Slots) -> tuple[Keys, Slots]:
        """A transfer has read these slots; returns what no other one reads."""
        if self._read_again:
            last = [i for i in reversed(range(len(slots))) if self._is_last_reader(slots[i])][::-1]
            keys, slots = [keys[i] for i in last], [slots[i] for i in last]
        self._read.difference_update(slots)
        return keys, slots

    def forget(self, slots: Iterable[int]) -> None:
        """The keys of these slots are forgotten while a transfer uses them."""
        self.forgotten.update(slots)

    def take_forgotten(self, slots: Slots) -> set[int]:
        """Those of these slots, which nothing uses any more, that belong to no key."""
        free = self.forgotten.intersection(slots)
        self.forgotten -= free
        return free

    def _is_last_reader(self, slot: int) -> bool:
        others = self._read_again.get(slot, 0)
        if others > 1:
            self._read_again[slot] = others - 1
        elif others:
            del self._read_again[slot]
        return not others
