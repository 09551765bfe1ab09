"""What is told of requests that have ended, so that their blocks leave the tier together."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from integration.engine.mini import BLOCK, Mini
from scheduler_half import parts
from scheduler_half.scenarios import prompt

from kvoffload_patch.config import EVICTIONS


def hashes(tokens: list[int]) -> list[Any]:
    return list(parts.make_request("asked", tokens, 1).block_hashes)


@pytest.mark.parametrize("load_mode", ["inline", "parked"])
def test_what_was_stored_or_loaded_at_once_is_not_put_together_again(
    load_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mini = Mini(load_mode=load_mode)
    told: list[Any] = []
    monkeypatch.setattr(
        mini.manager, "request_ended", lambda keys, **how: told.append((len(keys), how))
    )
    asked = prompt(6, seed=1)
    mini.only_in_cpu(asked)
    mini.step()
    assert told == [(6, {"together": False})], "but each rests on the one before it"
    name = mini.add(asked, count=1)
    mini.run()
    mini.step()
    assert mini.hits[name] and len(told) == 1, "which is known"
    mini.add(asked + prompt(2, seed=2), count=1)
    mini.run()
    mini.step()
    assert told[1:] == [(8, {"in_order": True})]


def test_blocks_of_several_groups_do_not_rest_on_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mini = Mini(windows=(None, 40), blocks=49)
    told: list[Any] = []
    monkeypatch.setattr(mini.manager, "request_ended", lambda keys, **how: told.append(how))
    mini.add(prompt(3, seed=1), count=40)
    mini.run()
    mini.step()
    assert told == [{"in_order": False}]


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_what_one_request_has_left_of_a_prefix_leaves_from_its_tail(eviction: str) -> None:
    """Its head is used again, and by others; its answer was stored a block at a time."""
    mini = Mini(eviction=eviction, num_slots=20, limits={"max_num_batched_tokens": 64})
    asked = prompt(4, seed=1)
    name = mini.add(asked, count=4 * BLOCK)
    mini.run()
    mini.step()
    keys = [mini.view.key(h, 0) for h in hashes(asked + mini.answers[name])]
    assert len(keys) == 8 and all(map(mini.manager.holds, keys))
    for seed in range(2, 7):
        mini.add(asked[: 2 * BLOCK] + prompt(3, seed=seed), count=2)
        mini.run()
        mini.settle()
        mini.step()
        held = [mini.manager.holds(key) for key in keys]
        assert held == sorted(held, reverse=True), held
    assert not held[-1]
