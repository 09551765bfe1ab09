"""The load of `bench chats`: the same for every mode, within its bounds, larger than the GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scripts.bench.chats import load as load_of
from scripts.bench.chats.load import SMALL, Load

BLOCK = {"gpu": 16, "small": 128}  # tokens; vLLM's own size on each device
LOADS = {"gpu": Load(), "small": SMALL}


def test_a_seed_makes_the_same_load_and_another_seed_another() -> None:
    assert load_of.chats(SMALL) == load_of.chats(SMALL)
    assert load_of.singles(SMALL, "quiet") == load_of.singles(SMALL, "quiet")
    other = load_of.chats(replace(SMALL, seed="other"))
    assert [chat.said[:8] for chat in other] != [chat.said[:8] for chat in load_of.chats(SMALL)]


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_lengths_and_tokens_are_within_their_bounds(load: Load) -> None:
    made = load_of.chats(load)
    assert len(made) == load.chats
    for chat in made:
        assert load.history_min <= len(chat.said) <= load.history_max
        first, *later = chat.turns
        assert first.new == [] and len(later) == load.turns - 1
        assert all(load.new_min <= len(turn.new) <= load.new_max for turn in later)
        assert all(load.answer_min <= turn.answer <= load.answer_max for turn in chat.turns)
        assert min(chat.said) >= 0 and max(chat.said) < load.vocabulary
    assert len({len(chat.said) for chat in made}) > load.chats // 2


@pytest.mark.parametrize("device", LOADS)
def test_what_comes_again_has_left_the_gpu(device: str) -> None:
    load, block = LOADS[device], BLOCK[device]
    between = [len(chat.said) // block for chat in load_of.chats(load)]
    # Those that are asked at the same time may be the last ones before it, and the shortest.
    assert sum(sorted(between)[: load.chats - load.at_once]) > load.gpu_blocks
    singles = [len(single.stored) // block for single in load_of.singles(load, "quiet")]
    assert sum(singles) - max(singles) >= load.gpu_blocks


def test_a_chat_says_what_was_said_and_what_is_new() -> None:
    chat = load_of.Chat("c", [1, 2], [load_of.Turn([], 2), load_of.Turn([5], 1)])
    assert chat.ask() == ("c-turn-1", [1, 2], 2) and chat.left == 1
    chat.answered([3, 4])
    assert chat.ask() == ("c-turn-2", [1, 2, 3, 4, 5], 1) and chat.left == 0


def test_single_prompts_of_each_kind_and_time_share_nothing() -> None:
    quiet, after = load_of.singles(Load(), "quiet"), load_of.singles(Load(), "after")
    starts = [tuple(single.stored[:16]) for single in [*quiet, *after]]
    assert len(set(starts)) == len(starts)
    lengths = {single.kind: len(single.stored) for single in quiet}
    assert lengths == {"whole": 8192, "ragged": 8187, "extended": 8092, "decoded": 8092}
    assert lengths["whole"] % 16 == 0 and lengths["ragged"] % 16
    for single in quiet:
        more = 200 if single.kind in ("extended", "decoded") else 0
        assert [len(new) for new in single.extensions] == [more] * Load().singles_rounds
        assert not more or single.extensions[0] != single.extensions[1]
        assert single.answer == (16 if single.kind == "decoded" else 1)
