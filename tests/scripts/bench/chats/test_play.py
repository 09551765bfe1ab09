"""The phases of `bench chats`, with a server that answers at once."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from typing import Any

import pytest

from scripts.bench.chats import play
from scripts.bench.chats.client import Answer
from scripts.bench.chats.load import SMALL, Load

LOAD = replace(SMALL, stagger_s=0.0, pause_s=0.0)


class Server:
    """Answers token n with n, one after the other, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[int], int]] = []
        self.now = 0.0
        self.running = self.most = 0

    async def ask(self, name: str, prompt: list[int], answer: int) -> Answer:
        self.asked.append((name, prompt, answer))
        self.running += 1
        self.most = max(self.most, self.running)
        sent = self.now
        await asyncio.sleep(0)
        self.now += 1.0
        self.running -= 1
        at = [sent + 0.010 + 0.002 * i for i in range(answer)]
        return Answer(name, len(prompt), sent, len(prompt), list(range(answer)), at)


def played(*phases: str, load: Load = LOAD, times: bool = False) -> tuple[Server, list[Any]]:
    server = Server()
    player = play.Player(load, server.ask, times)

    async def run() -> list[Any]:
        return [await player.play(phase) for phase in phases]

    return server, asyncio.run(run())


def test_each_chat_has_all_its_turns_on_what_was_answered() -> None:
    server, (first, later) = played("first", "later")
    by_chat: dict[str, list[Any]] = {}
    for name, prompt, answer in server.asked:
        by_chat.setdefault(name.rpartition("-turn-")[0], []).append((name, prompt, answer))
    assert len(by_chat) == LOAD.chats
    for chat, turns in by_chat.items():
        assert [name for name, *_ in turns] == [f"{chat}-turn-{i + 1}" for i in range(LOAD.turns)]
        for (_, before, answer), (_, prompt, _) in zip(turns, turns[1:]):
            assert prompt[: len(before) + answer] == before + list(range(answer))
            new = len(prompt) - len(before) - answer
            assert LOAD.new_min <= new <= LOAD.new_max
    assert len(first["first"]) == LOAD.chats and server.most == LOAD.at_once
    assert len(later["first"]) == LOAD.chats * (LOAD.turns - 1)


@pytest.mark.parametrize("chats", [1, 3])
def test_more_clients_than_chats_wait_for_them(chats: int) -> None:
    server, (_, later) = played("first", "later", load=replace(LOAD, chats=chats, at_once=4))
    assert len(later["first"]) == chats * (LOAD.turns - 1)
    assert len({name for name, *_ in server.asked}) == len(server.asked) == chats * LOAD.turns


def test_single_prompts_are_stored_first_and_then_asked_for_alone() -> None:
    load = replace(LOAD, singles_rounds=2)
    server, (found,) = played("quiet", load=load)
    count = 4 * load.singles
    stored, asked = server.asked[:count], server.asked[count:]
    assert all(answer == play.FILL_ANSWER for *_, answer in stored)
    assert len(asked) == 2 * count and found["kinds"][:4] == [
        "whole", "ragged", "extended", "decoded"
    ]  # fmt: skip
    for (_, prompt, _), (_, part, _) in zip(asked, [*stored, *stored]):
        assert prompt[: len(part)] == part
    server.asked, server.most = [], 0
    alone, _ = played("quiet", load=replace(load, at_once=1))
    assert alone.most == 1
    assert [name for name, *_ in asked] == [name for name, *_ in alone.asked[count:]]


def test_a_result_has_every_request_in_milliseconds() -> None:
    _, (found,) = played("first", times=True)
    assert found["first"] == [10.0] * LOAD.chats
    assert found["whole"] == [pytest.approx(10 + 2 * (n - 1)) for n in found["tokens"]]
    assert found["cached"] == found["prompt"]
    assert found["gaps"] == {"p50": 2.0, "p99": 2.0, "largest": 2.0}
    assert found["began"] == 0.0
    assert [len(request["at"]) for request in found["requests"]] == found["tokens"]
    words = play.words("first", found)
    assert "100.0% of the prompts found" in words and "first token p50 10.0" in words
    assert "requests" not in played("first")[1][0]


def test_collections_are_off_only_while_a_phase_is_played() -> None:
    seen = []

    async def ask(name: str, prompt: list[int], answer: int) -> Answer:
        seen.append(gc.isenabled())
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        asyncio.run(play.Player(LOAD, ask).play("warm"))
    assert seen and not any(seen) and gc.isenabled()
