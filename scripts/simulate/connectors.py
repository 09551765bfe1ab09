"""The rules of vLLM's own connectors, as of 0.32 and 0.33, in our words and on our manager.

What is left out is in their favour: their stores begin a step later than here, a preempted request
waits for all copies, a request waits a step for a key that is being written, and requests that
share a load wait for one another.

`SimpleEager`: a request's blocks are stored as they are computed, those that it found on the GPU
included where the CPU lacks them. A use is a store or a load; a hit on the GPU is none. Blocks of a
transfer become evictable when it ends, head first, so that the head of a prefix leaves before its
tail.

`SimpleLazy`: blocks are stored as they come near the front of the GPU's free queue, and go to its
end then, the most recent of all. A prefix that is always in use comes never near it.

`OffloadingLru`, `OffloadingArc`: blocks of prompts are stored as they are computed, answers are
not. A request that loads nothing offers what it found on the GPU as well: a use of the copy, which
is stored again where there is none. One that loads offers nothing before the end of its load. When
it ends, all that it offered or loaded becomes recent, tail first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice

from scripts.simulate.gpu import GpuPool
from scripts.simulate.rules import IgnoresRequests, Keys, Rules, Run


class InOrder:
    """Least recently used first; a block keeps its place while it is pinned.

    Args:
        key_of: of each slot.
        head_first: of slots that come together, that of the head is the first to leave.
    """

    def __init__(self, key_of: Sequence[Hashable], head_first: bool = False) -> None:
        self._head_first = head_first
        self._order: OrderedDict[int, None] = OrderedDict()
        self._pinned: set[int] = set()

    def grow(self) -> None:
        pass

    def miss(self, keys: Iterable[Hashable]) -> None:
        pass

    def hit(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if slot in self._order:
                self._order.move_to_end(slot)

    def regroup(self, slots: Sequence[int]) -> None:
        self.hit(slots)

    def insert(self, slots: Sequence[int]) -> None:
        self._order.update(dict.fromkeys(slots[::-1] if self._head_first else slots))

    def pin(self, slots: Sequence[int]) -> None:
        self._pinned.update(slots)

    def unpin(self, slots: Sequence[int]) -> None:
        self._pinned.difference_update(slots)
        if self._head_first:
            self.hit(slots[::-1])

    def remove(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._order.pop(slot, None)
        self._pinned.difference_update(slots)

    def evict(self, count: int) -> Sequence[int]:
        evicted = _first(self._order, count, self._pinned)
        for slot in evicted:
            del self._order[slot]
        return evicted


class ConnectorArc:
    """ARC as the OffloadingConnector has it: by requests, with stores and ends of requests.

    A block that was seen once is in the first list, one that a later request used in the second.
    What leaves a list is remembered for as many blocks as there are slots. A block stored again
    that one list is remembered to have lost moves the share of the first list towards it.
    """

    def __init__(self, key_of: Sequence[Hashable]) -> None:
        self._key_of = key_of
        self._share = 0.0  # slots that the first list may have
        self._once: OrderedDict[int, None] = OrderedDict()
        self._often: OrderedDict[int, None] = OrderedDict()
        self._lost_once: OrderedDict[Hashable, None] = OrderedDict()
        self._lost_often: OrderedDict[Hashable, None] = OrderedDict()
        self._pinned: set[int] = set()

    def grow(self) -> None:
        pass

    def miss(self, keys: Iterable[Hashable]) -> None:
        once, often = self._lost_once, self._lost_often
        for key in keys:
            if key in once:
                more = max(1.0, len(often) / len(once))
                self._share = min(self._share + more, len(self._key_of))
            elif key in often:
                self._share = max(self._share - max(1.0, len(once) / len(often)), 0.0)

    def insert(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._once[slot] = None
            self._lost_once.pop(self._key_of[slot], None)
            self._lost_often.pop(self._key_of[slot], None)

    def hit(self, slots: Sequence[int]) -> None:
        """A request that used these has ended."""
        for slot in slots:
            if slot in self._once:
                del self._once[slot]
                self._often[slot] = None
            elif slot in self._often:
                self._often.move_to_end(slot)

    def regroup(self, slots: Sequence[int]) -> None:
        """A request that stored these has ended."""
        for slot in slots:
            for found in (self._once, self._often):
                if slot in found:
                    found.move_to_end(slot)

    def pin(self, slots: Sequence[int]) -> None:
        self._pinned.update(slots)

    def unpin(self, slots: Sequence[int]) -> None:
        self._pinned.difference_update(slots)

    def remove(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._once.pop(slot, None)
            self._often.pop(slot, None)
        self._pinned.difference_update(slots)

    def evict(self, count: int) -> Sequence[int]:
        over = len(self._once) - int(self._share) + 1
        first = _first(self._once, min(count, max(over, 0)), self._pinned)
        self._lose(first, self._once, self._lost_once)
        second = _first(self._often, count - len(first), self._pinned)
        self._lose(second, self._often, self._lost_often)
        rest = _first(self._once, count - len(first) - len(second), self._pinned)
        self._lose(rest, self._once, self._lost_once)
        return [*first, *second, *rest]

    def _lose(
        self,
        slots: Iterable[int],
        held: OrderedDict[int, None],
        lost: OrderedDict[Hashable, None],
    ) -> None:
        for slot in slots:
            del held[slot]
            lost[self._key_of[slot]] = None
        while len(lost) > len(self._key_of):
            lost.popitem(last=False)


def _first(order: Iterable[int], count: int, pinned: set[int]) -> list[int]:
    """The first ``count`` that are not pinned, or all."""
    found = (slot for slot in order if slot not in pinned)
    return list(islice(found, max(count, 0)))


def _head_first(key_of: Sequence[Hashable]) -> InOrder:
    return InOrder(key_of, head_first=True)


class SimpleEager(Rules):
    """SimpleCPUOffloadConnector as it is by default."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots, _head_first)

    def admitted(self, run: Run) -> None:
        for key, block in zip(run.request.keys[: run.on_gpu], run.blocks):
            if not self.manager.holds(key):
                self.manager.queue_store(key, block)

    def ended(self, run: Run) -> None:
        pass


class SimpleLazy(IgnoresRequests):
    """SimpleCPUOffloadConnector with ``lazy_offload``.

    Args:
        near: blocks of the GPU's free queue that it looks at in a step.
    """

    def __init__(self, slots: int, near: int) -> None:
        super().__init__(slots, _head_first)
        self._near = near
        self._queue: OrderedDict[int, None] = OrderedDict()  # free blocks not looked at yet

    def step(self, gpu: GpuPool, idle: Sequence[int]) -> None:
        for block in idle:
            self._queue[block] = None
            self._queue.move_to_end(block)
        for _ in range(min(self._near, len(self._queue))):
            block, _ = self._queue.popitem(last=False)
            key = gpu.key_of[block]
            if block in gpu.free and key is not None and not self.manager.holds(key):
                self.manager.queue_store(key, block)
                gpu.make_last(block)


class _Offloading(Rules):
    def admitted(self, run: Run) -> None:
        keys = run.request.keys
        if run.hit > run.on_gpu:
            run.reused += keys[run.on_gpu : run.hit]
            return
        for key, block in zip(keys[: run.on_gpu], run.blocks):
            if self.manager.holds(key):
                run.reused.append(key)
            else:
                run.stored.append(key)
                self.manager.queue_store(key, block)

    def computed(self, run: Run, keys: Keys, blocks: Sequence[int]) -> dict[Hashable, int]:
        run.stored += keys
        return super().computed(run, keys, blocks)

    def answered(self, run: Run, key: Hashable, block: int) -> None:
        pass

    def ended(self, run: Run) -> None:
        self.manager.request_ended(run.stored)
        self.manager.touch(run.reused)


class OffloadingLru(_Offloading):
    """OffloadingConnector with LRU, its default."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots, InOrder)


class OffloadingArc(_Offloading):
    """OffloadingConnector with ARC."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots, ConnectorArc)
