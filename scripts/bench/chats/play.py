"""The phases of one mode, played against a server that runs.

  warm    a few requests that do not count
  quiet   prompts one at a time, on a server that has had nothing else
  first   the first turn of every chat: nothing to find
  later   all other turns: each history has left the GPU, but on the floor
  after   prompts one at a time again, after the chats

A chat's next turn is asked for when all others that wait were: chats come back in the order in
which they were answered, and `at_once` clients always have one request each.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from scripts.bench.chats import load as load_of
from scripts.bench.chats.client import Answer
from scripts.bench.chats.load import Chat, Load, Single, Tokens
from scripts.bench.chats.steps import steps
from scripts.bench.common import quantile

PHASES = ("quiet", "first", "later", "after")
WARM_TOKENS = (300, 1500)
FILL_ANSWER = 4  # tokens; there are tiers that do not store prompts answered with one

Ask = Callable[[str, Tokens, int], Awaitable[Answer]]


class Player:
    """Plays phases, one after the other, and says what each gave.

    Args:
        ask: sends a request, by name, prompt and length of the answer.
        times: keep when each token came.
    """

    def __init__(self, load: Load, ask: Ask, times: bool = False) -> None:
        self._load = load
        self._ask = ask
        self._times = times
        self._chats = load_of.chats(load)

    async def play(self, phase: str) -> dict[str, Any]:
        """One phase: its requests, and figures over all of them."""
        gc.collect()
        gc.disable()  # a collection here would look like a slow server
        try:
            if phase == "warm":
                return await self._warm()
            if phase in ("quiet", "after"):
                return await self._singles(phase)
            return await self._turns(1 if phase == "first" else self._load.turns - 1)
        finally:
            gc.enable()

    async def _warm(self) -> dict[str, Any]:
        size, low, high = self._load, *WARM_TOKENS
        step = (high - low) // max(1, size.at_once)
        texts = [
            load_of.tokens(f"{size.seed}-warm-{i}", low + i * step, size.vocabulary)
            for i in range(size.at_once)
        ]
        answers = [self._ask(f"warm-{i}", text, 24) for i, text in enumerate(texts)]
        return self.result(await asyncio.gather(*answers), {})

    async def _turns(self, turns: int) -> dict[str, Any]:
        """So many turns of each chat."""
        waiting: asyncio.Queue[Chat] = asyncio.Queue()
        due = {chat.name: turns for chat in self._chats}
        for chat in self._chats:
            waiting.put_nowait(chat)
        answers: list[Answer] = []
        left = turns * len(self._chats)

        async def one_client(number: int) -> None:
            nonlocal left
            await asyncio.sleep(number * self._load.stagger_s)
            while left:
                left -= 1
                chat = await waiting.get()
                answer = await self._ask(*chat.ask())
                chat.answered(answer.tokens)
                answers.append(answer)
                due[chat.name] -= 1
                if due[chat.name]:
                    waiting.put_nowait(chat)

        await asyncio.gather(*(one_client(number) for number in range(self._load.at_once)))
        return self.result(answers, {})

    async def _singles(self, when: str) -> dict[str, Any]:
        """Have prompts stored, then ask for each alone, in the same order."""
        texts = load_of.singles(self._load, when)
        await self._fill(texts)
        answers, kinds = [], []
        for turn in range(self._load.singles_rounds):
            for text in texts:
                await asyncio.sleep(self._load.pause_s)
                prompt = [*text.stored, *text.extensions[turn]]
                answers.append(await self._ask(f"{text.name}-{turn}", prompt, text.answer))
                kinds.append(text.kind)
        return self.result(answers, {"kinds": kinds})

    async def _fill(self, texts: Iterable[Single]) -> None:
        left = list(texts)[::-1]

        async def one_client() -> None:
            while left:
                text = left.pop()
                await self._ask(f"{text.name}-stored", text.stored, FILL_ANSWER)

        await asyncio.gather(*(one_client() for _ in range(self._load.at_once)))

    def result(self, answers: list[Answer], more: dict[str, Any]) -> dict[str, Any]:
        """For JSON: a list for each property, an entry for each request; milliseconds."""
        began = min(answer.sent for answer in answers)
        gaps = [1000 * gap for answer in answers for gap in answer.gaps]
        found = {
            **more,
            "seconds": max(answer.at[-1] for answer in answers) - began,
            "prompt": [answer.prompt for answer in answers],
            "cached": [answer.cached for answer in answers],
            "tokens": [len(answer.tokens) for answer in answers],
            "first": [_ms(answer.first) for answer in answers],
            "whole": [_ms(answer.whole) for answer in answers],
            "gaps": {
                name: round(quantile(gaps, share), 2)
                for name, share in (("p50", 0.5), ("p99", 0.99), ("largest", 1.0))
                if gaps
            },
            "steps": steps(answer.at for answer in answers),
        }
        if self._times:
            found["began"] = began  # on the clock that all processes of the machine share
            found["requests"] = [
                {
                    "name": answer.name,
                    "sent": _ms(answer.sent - began),
                    "at": [_ms(at - began) for at in answer.at],
                    "engine": answer.engine,
                }
                for answer in answers
            ]
        return found


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)


def words(phase: str, found: dict[str, Any]) -> str:
    """One line of progress."""
    first = found["first"]
    text = f"{phase}: {len(first)} requests in {found['seconds']:.1f} s, "
    text += f"{sum(found['cached']) / sum(found['prompt']):.1%} of the prompts found; "
    text += f"first token p50 {quantile(first, 0.5):.1f}, p99 {quantile(first, 0.99):.1f}, "
    return (
        text + f"largest {max(first):.1f} ms; whole answer p50 {quantile(found['whole'], 0.5):.0f}"
    )
