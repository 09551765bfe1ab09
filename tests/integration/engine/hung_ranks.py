"""Ranks whose copies hang, whose process ends or answers no more, and the clock of all of it.

A copy hangs on the device, which never ends it; in the driver, from which the call that enqueues it
does not return; or in the queue, where nobody enqueues it. What would block a process in an engine
lets the clock go on here, which has the package's own watch of deadlines look, until that raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from engine.late_copies import LateQueue, _SyncCopyQueue
from integration.engine.modelled_rank import Rank, Shape
from integration.engine.several_ranks import Died, Executor

from kvoffload_patch.integration.protocol import attached
from kvoffload_patch.transfer.deadline import DeadlineWatch, Oldest
from kvoffload_patch.transfer.errors import CopyLate
from kvoffload_patch.transfer.tuning import DEADLINE_PERIOD_S

DEVICE, DRIVER, QUEUE = "device", "driver", "queue"
_LONGEST_S = 4000.0  # of anything that is waited for: nothing is stated that takes as long


class EngineDead(Exception):
    """vLLM itself has found that a rank is gone, or has waited for its step too long."""


class Clock:
    """Seconds, in the place of `time`; each of them the watches look.

    Attributes:
        now: since the start.
        watches: of the ranks.
    """

    def __init__(self) -> None:
        self.now, self._looked = 0.0, 0.0
        self.watches = list[DeadlineWatch]()

    def monotonic(self) -> float:
        """As of `time`."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """As of `time`, in steps that are not too many."""
        self.advance(max(seconds, DEADLINE_PERIOD_S / 4))

    def advance(self, seconds: float) -> None:
        """So much later; raises what a watch ends a process with."""
        until = self.now + seconds
        while self._looked + DEADLINE_PERIOD_S <= until:
            self._looked += DEADLINE_PERIOD_S
            self.now = self._looked
            for watch in self.watches:
                watch.look()
        self.now = until

    def block(self, while_true: Callable[[], object]) -> None:
        """A thread that would not go on."""
        until = self.now + _LONGEST_S
        while while_true():
            assert self.now < until, "it hangs for longer than is stated"
            self.advance(DEADLINE_PERIOD_S)


class HungQueue(LateQueue):
    """As `CopyQueue` is while a copy of it hangs; the copies are those of `LateQueue`.

    Attributes:
        clock: of all ranks.
        next: where the next copy hangs, and for how long.
        since: when one began to hang.
    """

    clock: Clock

    def __init__(self) -> None:
        super().__init__()
        self.next: tuple[str, float] | None = None
        self.since: float | None = None
        self._where, self._until, self._held, self._ended = "", 0.0, 0, 0

    @property
    def hangs(self) -> str:
        """Where its oldest copy does; empty: it does not."""
        if self._where and self.clock.now >= self._until:
            self._where = ""
        return self._where

    def hang(self, where: str, seconds: float) -> None:
        """The oldest copy does from now on."""
        self._where, self._until = where, self.clock.now + seconds
        self.since = self.clock.now if self.since is None else self.since

    def over(self) -> None:
        """Nothing hangs, nor will."""
        self._where, self.next = "", None

    def flush(self, ticket: int) -> None:
        while self._waiting and self._waiting[0][0][0] <= ticket:
            if self.hangs == QUEUE:  # the step's own thread enqueues it
                self._where = ""
            if self.hangs == DRIVER:
                self.clock.block(lambda: self.hangs)
            if self.hangs:
                return
            self._carry_out()

    def hold(self, stream: object, ticket: int) -> None:
        self._held = max(self._held, ticket)
        self.flush(self._held)

    def awaited(self) -> bool:
        """Whether the forward pass waits for what hangs."""
        return bool(self.hangs and self._waiting and self._waiting[0][0][0] <= self._held)

    def advance(self) -> bool:
        return not self.hangs and super().advance()

    def poll(self) -> int:
        for entry in self._waiting:
            entry[1] += 1
        while self._waiting and self._waiting[0][1] > self.patience and not self.hangs:
            self._carry_out()
        return _SyncCopyQueue.poll(self)

    def drain(self, check: Any = int) -> None:
        while self._waiting:
            if self.hangs == DRIVER:
                self.clock.block(lambda: self.hangs)
            elif self.hangs == DEVICE:
                check()
                self.clock.sleep(0)
            else:
                self._where = ""
                self._carry_out()

    def oldest(self) -> Oldest | None:
        """As of `CopyQueue`: what is only late waits for compute."""
        if not self._waiting:
            return None
        return Oldest(self._waiting[0][0][0], self._ended, bool(self.hangs))

    def expire(self, ticket: int, reason: str) -> bool:
        """As of `CopyQueue`."""
        if self.hangs != QUEUE or self._waiting[0][0][0] != ticket:
            return False

        def fail(_: object) -> NoReturn:
            raise CopyLate(reason)

        (_, _, _, *lost), _ = self._waiting.popleft()
        self._where = ""
        _SyncCopyQueue.submit(self, ticket, fail, (), *lost)
        return True

    def _carry_out(self) -> None:
        if self.next is not None:
            self.hang(*self.next)
            self.next = None
        for other, ticket in self._waiting[0][0][2]:
            other.flush(ticket)
            if other.hangs and other._waiting[0][0][0] <= ticket:
                self.hang(DEVICE, other._until - self.clock.now)
        if not self.hangs:
            self._ended += 1
            super()._carry_out()


class HungRank(Rank):
    """A rank with a clock, whose process may be gone.

    Attributes:
        clock: of all ranks.
        gone: `dead`, or `mute`: it is there and answers nothing.
    """

    queue = HungQueue
    clock: Clock

    def __init__(self, number: int, blocks: int, windows: Any, shape: Shape, *more: Any) -> None:
        super().__init__(number, blocks, windows, shape, *more)
        self.gone = ""

    def opened(self, *about: Any) -> None:
        """The tier is there, and its copies are watched."""
        super().opened(*about)
        engine = attached(self.runner)._engine
        queues = {link.link: link.queue for link in engine._all}
        engine._watch = DeadlineWatch(queues, int, lambda: engine._busy, _die)
        self.clock.watches.append(engine._watch)

    @property
    def queues(self) -> list[HungQueue]:
        """Of its copies."""
        tier = attached(self.runner)
        return [link.queue for link in tier._engine._all] if hasattr(tier, "_engine") else []

    def compute(self, *about: Any) -> Any:
        """The forward pass, which waits for the copies that it was made to wait for."""
        queues = self.queues
        self.clock.block(lambda: any(queue.awaited() for queue in queues))
        for queue in queues:
            queue.hold(None, 0)  # what has hung goes on
        return super().compute(*about)

    def begin(self) -> None:
        """The next step up to its forward pass, if the process is there."""
        self._check_there()
        super().begin()

    def end(self) -> None:
        """The rest of that step, likewise."""
        self._check_there()
        super().end()

    def _check_there(self) -> None:
        if self.gone:
            raise EngineDead(self.gone)


class Calls:
    """Calls of an executor, of whose ranks one may not answer.

    Args:
        executor: whose calls they are.
        clock: of all ranks.

    Attributes:
        waited_s: the longest that a call was waited for in vain, by its name.
    """

    def __init__(self, executor: Executor, clock: Clock) -> None:
        self._ranks, self._clock = executor.ranks, clock
        self._call, executor.collective_rpc = executor.collective_rpc, self.call  # type: ignore
        self.waited_s = dict[str, float]()
        self.before: Callable[[str], object] = str

    def call(self, function: Any, timeout: float, args: tuple[Any, ...]) -> Any:
        """As the executor's."""
        self.before(function.__name__)
        gone = {rank.gone for rank in self._ranks if rank.gone}  # type: ignore[attr-defined]
        if "dead" in gone:
            raise RuntimeError("Executor failed.")
        if gone:
            self.waited_s[function.__name__] = timeout
            self._clock.advance(timeout)
            raise TimeoutError("RPC call timed out")
        return self._call(function, timeout=timeout, args=args)


def _die() -> NoReturn:
    raise Died
