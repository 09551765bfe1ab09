"""What is left of an engine that nobody has any more, and nobody has closed.

Up to 0.30 vLLM closes nothing of an engine in its user's own process. The device may be in the
middle of a copy when that is collected. So the thread that watches deadlines has what copies use,
and the engine only weakly: it sees that the engine is gone, ends the copy thread, and lets go when
the device is done. None of this happens where the engine is collected: that may be on any thread,
within any call, also one that holds a lock of these queues.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from kvoffload_patch.transfer.queue import CopyQueue
from kvoffload_patch.transfer.thread import CopyThread


class Leftovers:
    """Keeps what copies use for as long as the device may use it.

    Args:
        engine: whose they are; it is not kept.
        thread: that enqueues its copies.
        queues: of its links.
        kept: what its copies read and write, and what they are made by.
    """

    def __init__(
        self, engine: object, thread: CopyThread, queues: Sequence[CopyQueue], *kept: object
    ) -> None:
        self._engine = weakref.ref(engine)
        self._thread = thread
        self._queues = queues
        self._kept = kept
        self._ends: list[Any] = []

    def are_over(self) -> bool:
        """Whether the engine is gone, and the device has done what it was given.

        Waits for the copy thread alone, when the engine is first found to be gone.
        """
        if self._engine() is not None:
            return False
        if not self._ends:
            self._thread.close()
            self._ends = [queue.abandon() for queue in self._queues]
        return all(end.query() for end in self._ends)
