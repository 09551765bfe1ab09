"""Random multi-turn traffic against a server, and the answers that it must give.

Plain vLLM answers every turn of every conversation once, one after the other: that is the key.
"""

from __future__ import annotations

import http.client
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scripts.soak.server import NAME, Server

VOCABULARY = 1024
ANSWER_TOKENS = 8
# Where plain vLLM's best token is so little ahead of the next (natural log of the ratio), a batch
# of another size may choose the other: that is counted apart.
TIE = 1e-3
RIGHT, TIED, WRONG, FAILED, LEFT = "right", "tied", "wrong", "failed", "left"


@dataclass
class Turn:
    """A prompt, and plain vLLM's answer with how far each token is ahead."""

    prompt: list[int]
    answer: list[int]
    ahead: list[float]

    def judge(self, found: Sequence[int]) -> str:
        """Of an answer, or of its beginning."""
        for wanted, token, ahead in zip(self.answer, found, self.ahead):
            if token != wanted:
                return TIED if ahead < TIE else WRONG
        return RIGHT


Conversation = list[Turn]


def answer_key(server: Server, count: int, turns: int, seed: int = 0) -> list[Conversation]:
    """Conversations, each turn of which begins with all before it."""
    rng, key = random.Random(seed), []
    for _ in range(count):
        prompt = _random(rng, rng.randint(150, 500))
        conversation: Conversation = []
        for _ in range(turns):
            found = list(server.ask(prompt, ANSWER_TOKENS))
            answer = [token for token, _ in found]
            conversation.append(Turn(prompt, answer, [ahead for _, ahead in found]))
            prompt = prompt + answer + _random(rng, rng.randint(20, 90))
        key.append(conversation)
    return key


def _random(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, VOCABULARY) for _ in range(count)]


class Traffic:
    """Users of a server, each a thread, until `stop`.

    Each takes up a conversation and goes through some of its turns. Now and then one ends a
    streamed answer, hangs up before it begins, or uses a cache salt of its own. In bursts nobody
    thinks between turns. Beside them, the prefix cache is reset, and memory is taken for a while.

    Args:
        server: which is asked.
        key: what it must answer.
        users: threads; half as many more in bursts.
        pressure_gib: memory that is taken now and then.
        in_turns: conversations are taken up one after the other, and not at random: a GPU that
            holds a part of them has lost all of one when it comes back.

    Attributes:
        counts: answers by `RIGHT` and so on, and events.
        wrongs: what was wrong, in words.
    """

    def __init__(
        self, server: Server, key: list[Conversation], users: int, pressure_gib: float, seed: int,
        in_turns: bool = False,
    ) -> None:  # fmt: skip
        self.counts: Counter[str] = Counter()
        self.wrongs: list[str] = []
        self._server, self._key = server, key
        self._numbers = itertools.cycle(range(len(key))) if in_turns else None
        self._pressure = int(pressure_gib * (1 << 30))
        self._over, self._burst = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        tasks = [(self._use, seed * 1000 + i, i >= users) for i in range(users + users // 2)]
        self._threads = [threading.Thread(target=t, args=args, daemon=True) for t, *args in tasks]
        self._threads.append(threading.Thread(target=self._disturb, args=(seed,), daemon=True))

    def start(self) -> None:
        """Let the users in."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Return once everybody has left."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _count(self, what: str, words: str = "") -> None:
        with self._lock:
            self.counts[what] += 1
            if words and len(self.wrongs) < 50:
                self.wrongs.append(words)

    def _use(self, seed: int, only_in_bursts: bool) -> None:
        rng = random.Random(seed)
        while not self._over.is_set():
            if only_in_bursts and not self._burst.wait(timeout=1):
                continue
            number = next(self._numbers) if self._numbers else rng.randrange(len(self._key))
            salt = {"cache_salt": f"{rng.randrange(4)}"} if rng.random() < 0.2 else {}
            for turn in self._key[number][: rng.randint(1, len(self._key[number]))]:
                if self._over.is_set():
                    return
                self._take_turn(rng, number, turn, salt)
                if not self._burst.is_set():
                    self._over.wait(rng.uniform(0, 0.4))

    def _take_turn(self, rng: random.Random, number: int, turn: Turn, more: dict[str, Any]) -> None:
        # None: to the end; 0: not even the beginning.
        upto = rng.choice([0, 1, 2, 4]) if rng.random() < 0.1 else None
        try:
            if upto == 0:
                self._hang_up(turn, more)
                return
            found = []
            for token, _ in self._server.ask(turn.prompt, ANSWER_TOKENS, **more):
                found.append(token)
                if len(found) == upto:
                    break
        except (OSError, RuntimeError, http.client.HTTPException) as error:
            self._count(FAILED, f"conversation {number}: {type(error).__name__}: {error}")
            return
        judged = turn.judge(found)
        if judged == WRONG or (upto is None and len(found) != ANSWER_TOKENS):
            self._count(WRONG, f"conversation {number}: {turn.answer} expected, {found} found")
        else:
            self._count(judged if upto is None else LEFT)

    def _hang_up(self, turn: Turn, more: dict[str, Any]) -> None:
        body = {"model": NAME, "prompt": turn.prompt, "max_tokens": ANSWER_TOKENS, **more}
        connection = self._server.send("/v1/completions", body)
        time.sleep(0.05)
        connection.close()
        self._count(LEFT)

    def _disturb(self, seed: int) -> None:
        """A burst, a reset or memory pressure every few seconds."""
        rng = random.Random(seed)
        while not self._over.wait(rng.uniform(4, 12)):
            what = rng.choice(["bursts", "resets", "pressures"])
            self._count(what)
            if what == "bursts":
                self._burst.set()
                self._over.wait(5)
                self._burst.clear()
            elif what == "pressures":
                taken = bytearray(b"x") * self._pressure
                self._over.wait(3)
                del taken
            else:
                try:
                    self._server.post("/reset_prefix_cache").close()
                except (OSError, http.client.HTTPException) as error:
                    self._count(FAILED, f"reset: {error}")
