"""Made-up traces, the same for the same seed; blocks of 512 tokens.

Conversations think between turns, agents hardly do and read what tools return. Each has a system
prompt that many share. Documents are asked about again and again, some far more than others. A scan
is a long prompt that never comes again.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count

from scripts.simulate.trace import BLOCK_TOKENS, Request

Turns = Iterator[Request]


class _Maker:
    """Makes requests whose blocks have numbers of their own, but for what they share."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._ids = count(1)

    def text(self, tokens: int) -> list[int]:
        """Ids for the full blocks of a new text, which others can begin with."""
        return [next(self._ids) for _ in range(tokens // BLOCK_TOKENS)]

    def request(self, at: float, keys: list[int], prompt: int, answer: int) -> Request:
        """A request whose first blocks are those of ``keys``, which grows by the new ones."""
        missing = (prompt + answer) // BLOCK_TOKENS - len(keys)
        keys += [next(self._ids) for _ in range(missing)]
        return Request(at, prompt, answer, tuple(keys))

    def length(self, low: int, high: int) -> int:
        """Tokens between two bounds, most of them nearer the lower one."""
        return int(low * (high / low) ** self.random.random())

    def session(
        self, at: float, shared: Sequence[int], turns: int, asked: tuple[int, int],
        answered: tuple[int, int], pause: float,
    ) -> Turns:  # fmt: skip
        """Requests that each begin with all that was said before; a fixed share of shared text."""
        keys, tokens = list(shared), len(shared) * BLOCK_TOKENS
        for _ in range(turns):
            prompt = tokens + self.length(*asked)
            answer = self.length(*answered)
            yield self.request(at, keys, prompt, answer)
            tokens = prompt + answer
            at += answer * 0.02 + 1 + self.random.expovariate(1 / pause)

    def arrivals(self, rate: float, end: float, begin: float = 0.0) -> Iterator[float]:
        """Times at which something begins, ``rate`` of them in a second."""
        at = begin + self.random.expovariate(rate)
        while at < end:
            yield at
            at += self.random.expovariate(rate)


def _chat(make: _Maker, rate: float, end: float, begin: float = 0.0) -> Iterator[Turns]:
    system = [make.text(make.length(1024, 4096)) for _ in range(4)]
    for at in make.arrivals(rate, end, begin):
        turns = 1 + int(make.random.expovariate(1 / 6))
        shared = make.random.choice(system)
        yield make.session(at, shared, turns, (100, 4000), (100, 900), 60.0)


def _agents(make: _Maker, rate: float, end: float) -> Iterator[Turns]:
    tools = [make.text(make.length(6000, 12_000)) for _ in range(6)]
    for at in make.arrivals(rate, end):
        turns = make.random.randint(8, 30)
        shared = make.random.choice(tools)
        pause = 60.0 if make.random.random() < 0.2 else 4.0
        yield make.session(at, shared, turns, (200, 5000), (50, 400), pause)


def _documents(
    make: _Maker, rate: float, end: float, begin: float = 0.0, number: int = 150
) -> Iterator[Turns]:
    texts = [make.text(make.length(8000, 50_000)) for _ in range(number)]
    weights = [1 / (place + 1) for place in range(number)]
    for at in make.arrivals(rate, end, begin):
        (text,) = make.random.choices(texts, weights)
        yield make.session(at, text, 1, (50, 500), (50, 400), 1.0)


def _scan(make: _Maker, rate: float, end: float) -> Iterator[Turns]:
    for at in make.arrivals(rate, end):
        yield make.session(at, (), 1, (8000, 32_000), (50, 200), 1.0)


def _in_turns(
    make: _Maker, number: int, end: float, begin: float, pause: float = 240.0, part: float = 0.05
) -> Iterator[Turns]:
    """A fixed number of conversations, each with a turn in every ``pause`` seconds.

    Or as much more or less as this part of it.
    """
    for place in range(number):
        if (at := begin + place * pause / number) < end:
            yield _turns(make, at, end, pause, part)


def _turns(make: _Maker, at: float, end: float, pause: float, part: float) -> Turns:
    keys: list[int] = []
    tokens, asked = 0, (8000, 14_000)
    while at < end:
        prompt, answer = tokens + make.length(*asked), make.length(50, 100)
        yield make.request(at, keys, prompt, answer)
        tokens, asked = prompt + answer, (60, 180)
        at += pause * (1 - part + 2 * part * make.random.random())


def _merged(sources: Sequence[Iterator[Turns]], end: float) -> list[Request]:
    """Requests of all sources in the order of their arrival, those of sessions that run on cut."""
    queue: list[tuple[float, int, Request, Turns]] = []
    numbers = count()
    sessions = [session for source in sources for session in source]
    for session in sessions:
        request = next(session)
        queue.append((request.arrival, next(numbers), request, session))
    heapq.heapify(queue)
    found = []
    while queue:
        _, number, request, session = heapq.heappop(queue)
        found.append(request)
        following = next(session, None)
        if following is not None and following.arrival < end:
            heapq.heappush(queue, (following.arrival, number, following, session))
    return found


def _phases(make: _Maker, end: float) -> list[Iterator[Turns]]:
    """Documents for a third of the time, then conversations, then documents, others than before."""
    third = end / 3
    return [
        _documents(make, 1.2, third),
        _chat(make, 0.8, 2 * third, third),
        _documents(make, 1.2, end, 2 * third),
    ]


def _takeover(make: _Maker, end: float) -> list[Iterator[Turns]]:
    """Few documents, asked about often, and then conversations that nearly fill a tier."""
    return [
        _documents(make, 1.2, end / 3, number=40),
        _in_turns(make, 90, end, end / 3),
        _chat(make, 0.1, end, end / 3),
    ]


WORKLOADS: dict[str, tuple[str, Callable[[_Maker, float], list[Iterator[Turns]]]]] = {
    "chat": ("conversations of several turns", lambda m, end: [_chat(m, 0.7, end)]),
    "agents": ("agents in tool loops", lambda m, end: [_agents(m, 0.25, end)]),
    "documents": ("questions about long documents", lambda m, end: [_documents(m, 1.2, end)]),
    "scan": (
        "documents and conversations, and prompts that never come again",
        lambda m, end: [_documents(m, 0.6, end), _chat(m, 0.3, end), _scan(m, 0.4, end)],
    ),
    "mix": (
        "all of these at once",
        lambda m, end: [
            _chat(m, 0.25, end), _agents(m, 0.06, end),
            _documents(m, 0.35, end), _scan(m, 0.2, end),
        ],
    ),
    "phases": ("documents, then conversations, then other documents", _phases),
    "takeover": ("few documents, then conversations that take turns", _takeover),
}  # fmt: skip


# Conversations that take turns, whose blocks are more than the GPU has, and fewer than the tier.
IN_TURNS: dict[str, tuple[str, Callable[[_Maker, float], list[Iterator[Turns]]]]] = {
    "turns": ("95 conversations in turns", lambda m, end: [_in_turns(m, 95, end, 0.0, 120.0)]),
    "turns-apart": (
        "70 conversations in turns, up to a third sooner or later",
        lambda m, end: [_in_turns(m, 70, end, 0.0, 120.0, 1 / 3)],
    ),
    "turns-chat": (
        "60 conversations in turns, and others",
        lambda m, end: [_in_turns(m, 60, end, 0.0, 120.0), _chat(m, 0.15, end)],
    ),
}


def generate(name: str, seconds: float = 1800.0, seed: int = 0) -> list[Request]:
    """A trace of so many seconds.

    Raises:
        KeyError: there is no workload of this name.
    """
    make = _Maker(seed)
    return _merged({**WORKLOADS, **IN_TURNS}[name][1](make, seconds), seconds)
