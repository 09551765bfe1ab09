"""When vLLM is given what the tier has looked up, and when it must look for itself."""

from __future__ import annotations

from collections.abc import Hashable
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload_patch.integration.engine.lookup import CpuHit
from kvoffload_patch.integration.engine.lookup_replay import Answer, Answers, answer_of

HASHES = ["a", "b", "c"]


class Coordinator:
    """A prefix cache of one group: GPU blocks by hash."""

    def __init__(self, cached: str) -> None:
        self.blocks = {
            key: SimpleNamespace(block_id=i, block_hash=key) for i, key in enumerate(cached)
        }
        self.block_pool = self
        self.lookups = 0

    def get_cached_block(self, block_hash: Hashable, groups: list[int]) -> list[Any] | None:
        return [self.blocks[block_hash]] if block_hash in self.blocks else None

    def find_longest_cache_hit(self, block_hashes: list[str], most: int) -> tuple[Any, ...]:
        self.lookups += 1
        found = []
        for block_hash in block_hashes[:most]:
            if block_hash not in self.blocks:
                break
            found.append(self.blocks[block_hash])
        return (found,), len(found), 7


def looked_up(coordinator: Coordinator, hashes: list[str]) -> tuple[Answers, Answer]:
    """A lookup of three, of which the GPU has some; its answer is given."""
    answers = Answers(coordinator)
    answers.record()
    coordinator.find_longest_cache_hit(hashes, 3)
    answer = answer_of(answers.recorded(), [("c", [0])], {})
    assert answer is not None
    answers.give(answer)
    coordinator.lookups = 0
    return answers, answer


def found(coordinator: Coordinator, hashes: list[str], most: int = 3) -> str:
    """The hashes of what a lookup finds."""
    groups, tokens, more = coordinator.find_longest_cache_hit(hashes, most)
    assert tokens == len(groups[0]) and more == 7
    return "".join(block.block_hash for block in groups[0])


def test_the_same_is_not_looked_up_again_in_this_step() -> None:
    coordinator, hashes = Coordinator("ab"), list(HASHES)
    answers, _ = looked_up(coordinator, hashes)
    assert found(coordinator, hashes) == "ab" and coordinator.lookups == 0
    answers.end_step()
    assert found(coordinator, hashes) == "ab" and coordinator.lookups == 1


def test_what_is_given_is_the_callers_to_change() -> None:
    coordinator, hashes = Coordinator("ab"), list(HASHES)
    looked_up(coordinator, hashes)
    coordinator.find_longest_cache_hit(hashes, 3)[0][0].clear()
    assert found(coordinator, hashes) == "ab" and coordinator.lookups == 0


@pytest.mark.parametrize("changed", ["list", "length", "block reused", "block reused for another"])
def test_another_question_or_another_cache_is_looked_up(changed: str) -> None:
    coordinator, hashes, most, expected = Coordinator("ab"), list(HASHES), 3, "ab"
    looked_up(coordinator, hashes)
    if changed == "list":
        hashes = list(HASHES)
    elif changed == "length":
        most, expected = 1, "a"
    else:
        block = coordinator.blocks.pop("b")
        block.block_hash = None if changed == "block reused" else "z"
        expected = "a"
    assert found(coordinator, hashes, most) == expected
    assert coordinator.lookups == 1


def test_a_longer_hit_is_found() -> None:
    coordinator, hashes = Coordinator("ab"), list(HASHES)
    looked_up(coordinator, hashes)
    coordinator.blocks["c"] = SimpleNamespace(block_id=2, block_hash="c")
    assert found(coordinator, hashes) == "abc" and coordinator.lookups == 1


def test_while_the_tier_looks_nothing_is_answered() -> None:
    coordinator, hashes = Coordinator("ab"), list(HASHES)
    answers, _ = looked_up(coordinator, hashes)
    answers.record()
    assert found(coordinator, hashes) == "ab" and coordinator.lookups == 1
    lookup = answers.recorded()
    assert lookup is not None and lookup.block_hashes is hashes
    answers.record()
    assert answers.recorded() is None, "left over from the one before"


def test_loaded_blocks_take_the_place_of_what_only_the_tier_had() -> None:
    coordinator, hashes = Coordinator("a"), list(HASHES)
    coordinator.blocks["b"] = CpuHit("b")
    answers = Answers(coordinator)
    answers.record()
    coordinator.find_longest_cache_hit(hashes, 3)
    loaded = SimpleNamespace(block_id=5, block_hash="b")
    answers.give(answer_of(answers.recorded(), [], {"b": loaded}))
    coordinator.lookups = 0
    (blocks,), tokens, _ = coordinator.find_longest_cache_hit(hashes, 3)
    assert blocks == [coordinator.blocks["a"], loaded] and tokens == 2
    assert coordinator.lookups == 0


def test_there_is_no_answer_where_looking_is_as_good() -> None:
    coordinator = Coordinator("ab")
    answers = Answers(coordinator)
    assert answer_of(None, [], {}) is None
    answers.record()
    coordinator.find_longest_cache_hit(["x"], 3)
    nothing = answers.recorded()
    assert answer_of(nothing, [("x", [0])], {}) is None
    answers.record()
    coordinator.find_longest_cache_hit(list(HASHES), 3)
    assert answer_of(answers.recorded(), [("x", [0])] * 100, {}) is None
    answers.give(None)


def test_at_its_end_the_coordinator_is_as_it_was() -> None:
    coordinator, hashes = Coordinator("ab"), list(HASHES)
    answers, _ = looked_up(coordinator, hashes)
    answers.close()
    assert "find_longest_cache_hit" not in vars(coordinator)
    assert found(coordinator, hashes) == "ab" and coordinator.lookups == 1
    answers.close()
