"""When vLLM is given what the tier has looked up, and when it must look for itself."""

from __future__ import annotations

from collections.abc import Hashable
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload_patch.integration.engine.lookup import LookupResult, TierHit
from kvoffload_patch.integration.engine.lookup_replay import LookupReplay

HASHES = ["a", "b", "c"]


class FullAttentionManager:
    """Its name says that a lookup ends at the first block that is nowhere."""


class SlidingWindowManager:
    """Its lookups drop blocks that they have seen."""


class Coordinator:
    """A prefix cache of one group, blocks of one token: GPU blocks by hash."""

    def __init__(self, cached: str, *managers: type) -> None:
        self.blocks = {
            key: SimpleNamespace(block_id=i, block_hash=key) for i, key in enumerate(cached)
        }
        self.block_pool = self
        self.single_type_managers = [kind() for kind in managers or (FullAttentionManager,)]
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


def view(coordinator: Coordinator, **more: Any) -> Any:
    manager = SimpleNamespace(coordinator=coordinator)
    return SimpleNamespace(**{"manager": manager, "block_sizes": (1,), "decode_tokens": 1, **more})


def looked_up(coordinator: Coordinator, hashes: list[str]) -> LookupReplay:
    """A lookup of three, of which the GPU has some, which is given back."""
    replay = LookupReplay(view(coordinator))
    groups, tokens, _ = coordinator.find_longest_cache_hit(hashes, 3)
    replay.give(request(hashes), result_of(groups[0], tokens))
    coordinator.lookups = 0
    return replay


def request(hashes: list[str]) -> Any:
    return SimpleNamespace(block_hashes=hashes)


def result_of(blocks: list[Any], tokens: int) -> LookupResult:
    result = LookupResult(4)
    result.tokens, result.prefix = tokens, list(blocks)
    result.keys = [block.block_hash for block in blocks]
    return result


def found(coordinator: Coordinator, hashes: list[str], most: int = 3) -> str:
    """The hashes of what a lookup finds."""
    groups, tokens, more = coordinator.find_longest_cache_hit(hashes, most)
    assert tokens == len(groups[0]) and more == 7
    return "".join(block.block_hash for block in groups[0])


def test_the_same_is_not_looked_up_again_in_this_step() -> None:
    coordinator, hashes = Coordinator("ab"), list(HASHES)
    replay = looked_up(coordinator, hashes)
    assert found(coordinator, hashes) == "ab" and coordinator.lookups == 0
    replay.end_step()
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


def test_loaded_blocks_take_the_place_of_what_only_the_tier_had() -> None:
    coordinator, hashes = Coordinator("ac"), list(HASHES)
    replay = LookupReplay(view(coordinator))
    assert found(coordinator, hashes) == "a"
    hit, loaded = TierHit("b", "cpu"), SimpleNamespace(block_id=5, block_hash="b")
    blocks = coordinator.blocks
    result = result_of([blocks["a"], hit, blocks["c"]], 3).loaded([loaded])
    blocks["b"] = loaded
    coordinator.lookups = 0
    replay.give(request(hashes), result)
    assert found(coordinator, hashes) == "abc" and coordinator.lookups == 0


def test_nothing_found_is_looked_up_again() -> None:
    coordinator, hashes = Coordinator("ab"), ["x"]
    looked_up(coordinator, hashes)
    assert found(coordinator, hashes) == "" and coordinator.lookups == 1


@pytest.mark.parametrize(
    ("managers", "decode_tokens"),
    [
        ((FullAttentionManager, FullAttentionManager), 1),
        ((FullAttentionManager, SlidingWindowManager), 1),
        ((SlidingWindowManager,), 1),
        ((FullAttentionManager,), 4),  # a drafting model
    ],
)
def test_where_lookups_drop_blocks_vllm_looks_for_itself(
    managers: tuple[type, ...], decode_tokens: int
) -> None:
    coordinator, hashes = Coordinator("ab", *managers), list(HASHES)
    replay = LookupReplay(view(coordinator, decode_tokens=decode_tokens))
    assert "find_longest_cache_hit" not in vars(coordinator)
    replay.give(request(hashes), result_of(list(coordinator.blocks.values()), 2))
    assert found(coordinator, hashes) == "ab" and coordinator.lookups == 1


def test_older_managers_keep_the_hashes_themselves() -> None:
    coordinator, hashes = Coordinator("ab"), list(HASHES)
    shown = view(coordinator)
    shown.manager.req_to_block_hashes = {"r": hashes}
    replay = LookupReplay(shown)
    blocks, tokens, _ = coordinator.find_longest_cache_hit(hashes, 3)
    coordinator.lookups = 0
    replay.give(SimpleNamespace(request_id="r"), result_of(blocks[0], tokens))
    assert found(coordinator, hashes) == "ab" and coordinator.lookups == 0


def test_at_its_end_the_coordinator_is_as_it_was() -> None:
    coordinator, hashes = Coordinator("ab"), list(HASHES)
    replay = looked_up(coordinator, hashes)
    replay.close()
    assert "find_longest_cache_hit" not in vars(coordinator)
    assert found(coordinator, hashes) == "ab" and coordinator.lookups == 1
    replay.close()
