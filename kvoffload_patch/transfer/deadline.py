"""The deadline of copies: one without progress for too long fails, or ends the engine.

A thread of its own looks at the queues, because the copy thread may be the one that hangs in the
driver. The step reads one attribute.

| The oldest copy of a link makes no progress, and | what happens |
| --- | --- |
| compute before it is not over | nothing: the copy is not due |
| none of it is enqueued | it fails, and its ticket is done: the device does not know its blocks |
| some of it is enqueued | the next step raises: the device may still read or write its blocks |
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from kvoffload_patch.links import Link
from kvoffload_patch.threads import EXIT_S, JoinedThread
from kvoffload_patch.transfer.errors import TransferError
from kvoffload_patch.transfer.tuning import DEADLINE_PERIOD_S, DEADLINE_S

logger = logging.getLogger("vllm.kvoffload_patch")


class Oldest(NamedTuple):
    """The oldest copy of a queue that is not done.

    Attributes:
        ticket: its last ticket.
        slices: slices that the queue has enqueued so far, of whatever copy.
        due: whether compute before it is over.
    """

    ticket: int
    slices: int
    due: bool


class Watched(Protocol):
    """A queue of copies."""

    def oldest(self) -> Oldest | None: ...
    def expire(self, ticket: int, reason: str) -> bool: ...


class DeadlineWatch:
    """Looks at queues in a thread of its own, until it is closed.

    Time counts in looks: a process that was stopped for a while has not looked.

    Args:
        queues: by link.
        enter: called first on the thread.

    Attributes:
        overdue: whether a copy that the device may still carry out is past its deadline.
    """

    def __init__(self, queues: Mapping[Link, Watched], enter: Callable[[], object]) -> None:
        self.overdue = False
        self._queues = queues
        self._enter = enter
        self._seen: dict[Link, Oldest] = {}
        self._looks: dict[Link, int] = {}  # since there was progress
        self._late: dict[Link, str] = {}
        self._closed = threading.Event()
        self._thread = JoinedThread(self._run, "kvoffload-deadlines", self._closed.set)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(EXIT_S)  # it may be in a driver that never returns

    def look(self) -> None:
        """Look at each queue once; called every `DEADLINE_PERIOD_S`."""
        for link, queue in self._queues.items():
            oldest = queue.oldest()
            if oldest is None or not oldest.due or oldest != self._seen.get(link):
                self._progress(link)
            if oldest is None:
                self._seen.pop(link, None)
                continue
            self._seen[link] = oldest
            self._looks[link] = self._looks.get(link, -1) + 1
            if self._looks[link] * DEADLINE_PERIOD_S >= DEADLINE_S and link not in self._late:
                self._is_late(link, queue, oldest.ticket)

    def check(self) -> None:
        """To be called while `overdue`.

        Raises:
            TransferError: a copy that the device may still carry out is past its deadline.
        """
        for link, sentence in list(self._late.items()):
            oldest = self._queues[link].oldest()
            if oldest is not None and oldest == self._seen.get(link):
                raise TransferError(sentence)

    def _progress(self, link: Link) -> None:
        self._looks.pop(link, None)
        if self._late.pop(link, None) is not None:
            logger.warning("kvoffload_patch: copies from %s to %s make progress again.", *link)
            self.overdue = bool(self._late)

    def _is_late(self, link: Link, queue: Watched, ticket: int) -> None:
        age = self._looks[link] * DEADLINE_PERIOD_S
        what = f"expected copy {ticket} from {link[0]} to {link[1]} to be done by now, found"
        if queue.expire(ticket, f"{what} it queued after {age:.0f} s, and gave it up."):
            logger.error(
                "kvoffload_patch: %s it queued after %.0f s; it counts as failed.", what, age
            )
            return
        self._late[link] = (
            f"{what} no progress for {age:.0f} s; the device may still read or write its "
            "blocks, so the CPU tier stops here: restart the server, or set KVOFFLOAD_DISABLE=1 "
            "to serve without it."
        )
        logger.error("kvoffload_patch: %s", self._late[link])
        self.overdue = True

    def _run(self) -> None:
        try:
            self._enter()
            while not self._closed.wait(DEADLINE_PERIOD_S):
                self.look()
        except Exception as error:  # noqa: BLE001 - the copies themselves may be all right
            logger.warning("kvoffload_patch: deadlines of copies are not watched: %s", error)
