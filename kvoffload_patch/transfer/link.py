"""One link of a rank: its queue, how a copy on it is made, and what waits for what."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvoffload_patch.links import CPU, GPU, LOAD, STORE, Failure, Link, Tickets, ticket_on
from kvoffload_patch.plan import Transfer
from kvoffload_patch.transfer.backends.base import CopyBackend, Slices, Streams
from kvoffload_patch.transfer.errors import NotStored, TransferError
from kvoffload_patch.transfer.queue import CopyQueue, SyncCopyQueue
from kvoffload_patch.transfer.turns import ALONE, Turn

# Blocks of the source, blocks of the target, streams of the link, and whether the bytes are
# compared with their checksums; see `CopyBackend`.
Copy = Callable[[Sequence[int], Sequence[int], "Streams | None", bool], Slices]


def copies_of(backend: CopyBackend) -> dict[Link, Copy]:
    """What a backend copies, by link."""

    def load(
        slots: Sequence[int], ids: Sequence[int], streams: Streams | None, compared: bool
    ) -> Slices:
        return backend.load(ids, slots, streams, compared)

    def store(
        ids: Sequence[int], slots: Sequence[int], streams: Streams | None, compared: bool
    ) -> Slices:
        return backend.store(ids, slots, streams)

    return {LOAD: load, STORE: store}


def must_follow(link: Link, other: Link) -> bool:
    """Whether copies of ``link`` go behind what is known to be done on ``other``.

    They do where it has filled what they read, or has read or filled what they overwrite. The GPU's
    blocks are ordered by the forward pass.
    """
    source, target = link
    fills = other[1] != GPU and other[1] in link
    reads = other[0] != GPU and other[0] == target
    return other != link and (fills or reads)


class LinkCopies:
    """Submits the transfers of one link in the order of their tickets.

    Args:
        link: source and target.
        copy: makes a copy.
        queue: the order of the copies.
        bad: per place, blocks whose last copy into it has failed; shared by all links.
        wait_ready: called with a number of CPU slots before any of them is written to.
        turn: to which CPU slots this rank copies.

    Attributes:
        last: the last ticket submitted.
        told: the ticket up to which failures have been told.
    """

    def __init__(
        self,
        link: Link,
        copy: Copy,
        queue: CopyQueue | SyncCopyQueue,
        bad: dict[str, set[int]],
        wait_ready: Callable[[int], None] | None = None,
        turn: Turn = ALONE,
    ) -> None:
        self.link = link
        self.queue = queue
        self.last = self.told = 0
        self._copy = copy
        self._bad = bad
        self._wait_ready = wait_ready if link[1] == CPU else None
        self._turn = turn if link[1] == CPU else ALONE
        self._behind: list[LinkCopies] = []

    def connect(self, links: Mapping[Link, LinkCopies]) -> None:
        """Find the links that copies of this one go behind."""
        # Weakly: each would have the other, and both the backend's memory until a collection.
        behind = (other for name, other in links.items() if must_follow(self.link, name))
        self._behind = [weakref.proxy(other) for other in behind]

    def submit(self, transfer: Transfer, done: Tickets) -> None:
        """Submit a transfer.

        Args:
            done: of its plan.

        Raises:
            TransferError: a ticket is missing or came twice.
        """
        if transfer.ticket != self.last + 1:
            raise TransferError(
                f"expected ticket {self.last + 1} from {self.link[0]} to {self.link[1]}, found "
                f"{transfer.ticket}: a plan was lost or came twice, so the CPU tier cannot "
                "vouch for its bytes."
            )
        self.last = transfer.ticket
        source_ids, target_ids = self._turn.own(transfer.source_ids, transfer.target_ids)
        start = partial(self._copy_blocks, source_ids, target_ids, transfer.compared)
        behind = [(other.queue, ticket_on(done, other.link)) for other in self._behind]
        # GPU blocks are vLLM's: what is wrong in one is its request's, and told with the failure.
        lost = int if self.link[1] == GPU else partial(self._lose, target_ids)
        self.queue.submit(transfer.ticket, start, behind, lost)

    def poll(self) -> int:
        """The last ticket done; never waits. Its failures are told after this."""
        self.told = self.queue.poll()
        return self.told

    def failed(self) -> tuple[Failure, ...]:
        """Failures to be told."""
        failed = self.queue.failed
        if not failed:
            return ()
        told = self._failed_up_to(self.told)
        return tuple([Failure(self.link, ticket, failed[ticket].reason) for ticket in told])

    def forget(self, known_done: int) -> None:
        """Forget the failures that the other side has heard of."""
        # Another rank may have said that they are done: forget what this one has told, only.
        for ticket in self._failed_up_to(min(known_done, self.told)):
            del self.queue.failed[ticket]

    def _failed_up_to(self, last: int) -> list[int]:
        # Copied in one go: another thread adds to it.
        return [ticket for ticket in list(self.queue.failed) if ticket <= last]

    def _copy_blocks(
        self,
        source_ids: Sequence[int],
        target_ids: Sequence[int],
        compared: bool,
        streams: Streams | None,
    ) -> Slices:
        # On several ranks the scheduler does not hear of a copy that failed on this one.
        bad = self._bad.get(self.link[0])
        if bad and not bad.isdisjoint(source_ids):
            raise NotStored(
                f"an earlier copy of some of these blocks to the {self.link[0]} has failed on this "
                "rank."
            )
        if not target_ids:  # others copy all of it
            return None
        # A slot that another rank has and this one has not yet is waited for with the queues'
        # lock held, so that a step with loads of its own waits as well. That is rare and ends.
        if self._wait_ready is not None:
            self._wait_ready(max(target_ids) + 1)
        verdict = yield from self._copy(source_ids, target_ids, streams, compared)
        if bad := self._bad.get(self.link[1]):
            bad.difference_update(target_ids)
        return verdict

    def _lose(self, target_ids: Sequence[int]) -> None:
        """A copy into these blocks has failed: no other one may bring what they hold."""
        self._bad.setdefault(self.link[1], set()).update(target_ids)
