"""Calls by RPC come between the steps of a rank, not within one, whichever thread each is on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvoffload_patch.integration.worker.tuning import STEP_ENDS_S


class StepOrder:
    """Whose turn it is on a rank: a step's, or a call's.

    A worker has one thread for both as a rule, which carries them out in the order in which they
    were sent. One of Ray's compiled graph has a thread for steps and another one for calls. There a
    call may also come before a step that was sent before it, which nobody here can know.

    Args:
        settle: waits for what the device was given, whichever thread has given it.

    Attributes:
        closed: no step begins any more.
    """

    def __init__(self, settle: Callable[[], object]) -> None:
        self._settle = settle
        self._turn = threading.Condition()
        self._steps_on: int | None = None  # the thread of steps
        self._within = False
        self._calls = 0  # that wait for the end of a step
        self.closed = False

    def step_begins(self) -> bool:
        """Wait for calls that are being carried out, or wait; False if this rank is closed.

        Where a step follows another at once, a call that waits would not see that one has ended.
        """
        with self._turn:
            if self._calls:
                self.step_ends()  # the one before has, whether that was said or not
                self._turn.wait_for(lambda: not self._calls)
            self._steps_on, self._within = threading.get_ident(), not self.closed
            return not self.closed

    def step_ends(self) -> None:
        """It has ended, or will not go on."""
        with self._turn:
            self._within = False
            self._turn.notify_all()

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """While no step is carried out, nor begins.

        Raises:
            RuntimeError: the step on the other thread does not end.
        """
        with self._turn:
            if self._steps_on not in (None, threading.get_ident()):
                self._calls += 1
                try:
                    ended = self._turn.wait_for(lambda: not self._within, STEP_ENDS_S)
                finally:
                    self._calls -= 1
                    self._turn.notify_all()
                if not ended:
                    raise RuntimeError(
                        f"expected the step of this rank to end within {STEP_ENDS_S:.0f} s, found "
                        "it still under way"
                    )
                self._settle()  # copies are ordered by what the thread that submits them computes
            yield
