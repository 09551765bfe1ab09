"""Streaming sessions in a random run: requests that are given more input after each answer."""

from __future__ import annotations

import random
from typing import Any

from scheduler_half import parts
from scheduler_half.device import answer

_MOST_ALIVE = 3
_MAX_TOKENS = 300  # of a session


class Sessions:
    """Begins sessions, goes on with them and ends them, as the seed says.

    Attributes:
        goes_on: times that a session was given more input.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"sessions {seed}")
        self._turns: dict[str, list[tuple[list[int], int]]] = {}
        self._alive: list[str] = []
        self._aborted: set[str] = set()
        self.goes_on = 0

    def disturb(self, mini: Any) -> None:
        """Perhaps do something, between two steps."""
        rng = self._rng
        if rng.random() < 0.2 and len(self._alive) < _MOST_ALIVE:
            input_, count = self._input(), rng.choice([1, 3, 20])
            name = mini.add(input_, count, rng.randrange(3), resumable=True)
            self._turns[name] = [(input_, count)]
            self._alive.append(name)
        elif self._alive and rng.random() < 0.4:
            name = rng.choice(self._alive)
            does = rng.choice([self._go_on] * 5 + [self._end, self._abort])
            does(mini, name)

    def over(self, mini: Any) -> None:
        """All sessions end once they have answered."""
        for name in list(self._alive):
            self._end(mini, name)

    def check(self, mini: Any, ended: bool) -> None:
        """What came out is right; forgets it.

        It is all of it, unless the engine has ``ended``. vLLM itself loses turns where it is reset,
        and where it preempts a session that has a step under way besides.

        Raises:
            AssertionError: it is not.
        """
        may_lack = ended or mini.resets or mini.in_flight > 1
        for name, turns in self._turns.items():
            right, tokens = list[int](), list[int]()
            for input_, count in turns:
                tokens += input_
                given = answer(tokens, count)
                right += given
                tokens += given[:-1]  # the last one was not computed, and vLLM forgets it
            came = mini.answers.pop(name)
            assert came == right[: len(came)], f"{name} of {len(turns)} turns"
            assert may_lack or name in self._aborted or len(came) == len(right), name

    def _input(self) -> list[int]:
        return [self._rng.randrange(3, 999) for _ in range(self._rng.choice([1, 5, 16, 40]))]

    def _go_on(self, mini: Any, name: str) -> None:
        input_, count = self._input(), self._rng.choice([1, 3, 20])
        asked = [*self._turns[name], (input_, count)]
        if sum(len(given) + answered for given, answered in asked) > _MAX_TOKENS:
            self._end(mini, name)
            return
        self._turns[name] = asked
        self._say(mini, name, input_, count, True)
        self.goes_on += 1

    def _end(self, mini: Any, name: str) -> None:
        self._alive.remove(name)
        self._say(mini, name, [3], 1, False)

    def _abort(self, mini: Any, name: str) -> None:
        self._alive.remove(name)
        self._aborted.add(name)
        mini.abort(name)

    def _say(self, mini: Any, name: str, input_: list[int], count: int, more: bool) -> None:
        request = parts.make_request(name, input_, count, size=mini.device.size, resumable=more)
        mini.scheduler.add_request(request)


def has_sessions() -> bool:
    """Whether the release has any that go on rightly.

    From 0.15 to 0.30 vLLM keeps the length and the block hashes of the turn before, without a tier
    as well.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    stopped = getattr(Scheduler, "_handle_stopped_request", None)
    return stopped is not None and "drop_stale_output" in stopped.__code__.co_names
