"""Threads that are stopped and joined before the interpreter ends.

At its end Python ends every daemon thread that is left, where it next wants the GIL. Within the C++
of torch, Triton or a driver's binding that is ``std::terminate``: the process ends with SIGABRT
instead of its own status. A thread that is no daemon is waited for, and nothing tells it to end.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from typing import Any

# For all of them together. More than the longest call that they make and that ends (75 ms to touch
# `TOUCH_BYTES`, transfer/tuning.py), and no more than the 30 s after which Kubernetes kills what it
# has told to end. A driver that never returns must not keep the process.
EXIT_S = 30.0


class JoinedThread(threading.Thread):
    """A daemon thread that the end of the process waits for, `EXIT_S` at most.

    Args:
        target: what it runs.
        name: of the thread.
        stop: makes ``target`` return soon; called at the end of the process, on the main thread.
            None: it returns by itself.
        args: of ``target``.
    """

    def __init__(
        self,
        target: Callable[..., object],
        name: str,
        stop: Callable[[], object] | None,
        args: tuple[Any, ...] = (),
    ) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._stop_target = stop

    def start(self) -> None:
        """As any thread's.

        Raises:
            RuntimeError: it was started before, or the system has no more threads.
        """
        _running.add(self)
        try:
            super().start()
        except BaseException:
            if not self.is_alive():  # as one that was started before is
                _running.discard(self)
            raise

    def join(self, timeout: float | None = None) -> None:
        """As any thread's; one that could not be started has ended."""
        if self.ident is not None:
            super().join(timeout)

    def run(self) -> None:
        """Run the target."""
        try:
            super().run()
        finally:
            self._stop_target = None  # its owner may own this thread, and goes with its last user
            _running.discard(self)

    def request_stop(self) -> None:
        """Make the target return soon; does not wait for it."""
        stop = self._stop_target
        if stop is not None:
            stop()


_running: set[JoinedThread] = set()


def _join_all() -> None:
    threads = list(_running)
    for thread in threads:
        thread.request_stop()
    until = time.monotonic() + EXIT_S
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


atexit.register(_join_all)
os.register_at_fork(after_in_child=_running.clear)  # a child has the thread that forked only
