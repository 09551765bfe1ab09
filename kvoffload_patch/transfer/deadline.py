"""The deadline of copies: one without progress for too long fails, or ends the engine.

A thread of its own looks at the queues, because the copy thread may be the one that hangs in the
driver. The step reads one attribute.

| The oldest copy of a link makes no progress, and | what happens |
| --- | --- |
| compute before it is not over | nothing: the copy is not due |
| none of it is enqueued | it fails, and its ticket is done: the device does not know its blocks |
| some of it is enqueued | the next step raises: the device may still read or write its blocks |
| no step comes, because what would raise waits for the copy | after `GRACE_S` the process ends |
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from kvoffload_patch.links import Link
from kvoffload_patch.threads import EXIT_S, JoinedThread
from kvoffload_patch.transfer.errors import TransferError
from kvoffload_patch.transfer.tuning import DEADLINE_PERIOD_S, DEADLINE_S, GRACE_S

logger = logging.getLogger("vllm.kvoffload_patch")

_WAY_OUT = "restart the server, or set KVOFFLOAD_DISABLE=1 to serve without it."

# Watches that the end of the process has ended, with what they keep.
_NOT_FREED: list[DeadlineWatch] = []


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
    def awaited(self) -> bool: ...


class DeadlineWatch:
    """Looks at queues in a thread of its own, until it is closed or there is nothing to watch.

    Time counts in looks: a process that was stopped for a while has not looked, and each look asks
    the queues again.

    Args:
        queues: by link.
        enter: called first on the thread.
        busy: whether the step's thread is between two points at which it would raise.
        end: ends the process. None: it is not to be ended.
        is_over: asked before each look: whether there is nothing to watch any more.

    Attributes:
        overdue: whether a copy that the device may still carry out is past its deadline.
    """

    def __init__(
        self,
        queues: Mapping[Link, Watched],
        enter: Callable[[], object],
        busy: Callable[[], bool] = bool,
        end: Callable[[], object] | None = None,
        is_over: Callable[[], bool] = bool,
    ) -> None:
        self.overdue = False
        self._queues = queues
        self._enter = enter
        self._busy = busy
        self._end = end
        self._is_over = is_over
        self._seen: dict[Link, Oldest] = {}
        self._looks: dict[Link, int] = {}  # since there was progress
        self._late: dict[Link, str] = {}
        self._checked = False  # since the last look
        self._held_up = 0  # looks at which somebody waited, and nobody has checked
        self._closed = threading.Event()
        self._thread = JoinedThread(self._run, "kvoffload-deadlines", self._end_of_process)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
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
            if self._age(link) >= DEADLINE_S and link not in self._late:
                self._is_late(link, queue, oldest.ticket)
        self._look_who_waits()

    def check(self) -> None:
        """To be called while `overdue`.

        Raises:
            TransferError: a copy that the device may still carry out is past its deadline.
        """
        self._checked = True
        for link, sentence in list(self._late.items()):
            oldest = self._queues[link].oldest()
            if oldest is not None and oldest == self._seen.get(link):
                raise TransferError(sentence)

    def _progress(self, link: Link) -> None:
        self._looks.pop(link, None)
        if self._late.pop(link, None) is not None:
            logger.warning("kvoffload_patch: copies from %s to %s make progress again.", *link)
            self.overdue = bool(self._late)

    def _age(self, link: Link) -> float:
        return self._looks[link] * DEADLINE_PERIOD_S

    def _is_late(self, link: Link, queue: Watched, ticket: int) -> None:
        age, what = self._age(link), _overdue(link, ticket)
        if queue.expire(ticket, f"{what} it queued after {age:.0f} s, and gave it up."):
            logger.error(
                "kvoffload_patch: %s it queued after %.0f s; it counts as failed.", what, age
            )
            return
        self._late[link] = (
            f"{what} no progress for {age:.0f} s; the device may still read or write its "
            f"blocks, so the CPU tier stops here: {_WAY_OUT}"
        )
        logger.error("kvoffload_patch: %s", self._late[link])
        self.overdue = True

    def _look_who_waits(self) -> None:
        """Count for how long a late copy has held up what would raise it."""
        checked, self._checked = self._checked, False
        before, self._held_up = self._held_up, 0
        if self._late and not checked and self._somebody_waits():
            self._held_up = before + 1
            since = before * DEADLINE_PERIOD_S
            if since >= GRACE_S > since - DEADLINE_PERIOD_S:
                self._give_up()

    def _somebody_waits(self) -> bool:
        return self._busy() or any(queue.awaited() for queue in self._queues.values())

    def _give_up(self) -> None:
        link = next(iter(self._late))
        what = (
            f"{_overdue(link, self._seen[link].ticket)} no progress for {self._age(link):.0f} s, "
            f"{GRACE_S:.0f} s of which it has held up the step that would raise that"
        )
        if self._end is None:
            logger.error(
                "kvoffload_patch: %s; this process is not vLLM's own, so it is left to you: end "
                "it, and %s", what, _WAY_OUT,
            )  # fmt: skip
            return
        logger.error("kvoffload_patch: %s, so this process ends: %s", what, _WAY_OUT)
        self._end()

    def _end_of_process(self) -> None:
        """What is kept until it is over is not freed under the device for that."""
        _NOT_FREED.append(self)
        self._closed.set()

    def _run(self) -> None:
        try:
            self._enter()
            while not (self._closed.wait(DEADLINE_PERIOD_S) or self._is_over()):
                self.look()
        except Exception as error:  # noqa: BLE001 - the copies themselves may be all right
            logger.warning(
                "kvoffload_patch: deadlines of copies are not watched any more (%s), so one that "
                "hangs may not be noticed; restart the server to have them watched.", error,
            )  # fmt: skip


def _overdue(link: Link, ticket: int) -> str:
    return f"expected copy {ticket} from {link[0]} to {link[1]} to be done by now, found"
