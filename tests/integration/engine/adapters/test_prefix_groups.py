"""Blocks of several KV cache groups are told in the order in which they rest on each other."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from kvoffload_patch.integration.engine.adapters.prefix_groups import PrefixGroups

FullAttentionManager = type("FullAttentionManager", (), {})
SlidingWindowManager = type("SlidingWindowManager", (), {})


class Named(NamedTuple):
    """A key up to vLLM 0.10.1."""

    block_hash: Any
    group_id: int


def packed(block_hash: bytes, group: int) -> bytes:
    """A key from vLLM 0.10.2 on."""
    return block_hash + group.to_bytes(4, "big")


@pytest.mark.parametrize("key", [packed, Named])
def test_what_ends_with_a_block_of_full_attention_rests_on_it(key: Any) -> None:
    groups = PrefixGroups(key, [SlidingWindowManager(), FullAttentionManager()])
    a, b, c = b"aaaa", b"bbbb", b"cccc"
    given = [key(b, 0), key(c, 0), key(a, 1), key(b, 1), key(c, 1)]
    assert groups.in_order(given) == (
        [key(a, 1), key(b, 1), key(b, 0), key(c, 1), key(c, 0)],
        {key(b, 0): key(b, 1), key(c, 0): key(c, 1)},
    )


@pytest.mark.parametrize(
    ("key", "managers", "given"),
    [
        (packed, [SlidingWindowManager()] * 2, [packed(b"aaaa", 0), packed(b"aaaa", 1)]),
        # Its block has the hash of several of the first group's.
        (
            packed,
            [FullAttentionManager(), SlidingWindowManager()],
            [packed(b"aaaa", 0), packed(b"bb", 1)],
        ),
        (
            lambda made_of, group: bytes([group]) + made_of,
            [FullAttentionManager(), SlidingWindowManager()],
            [b"\0a" + bytes(4), b"\1a" + bytes(4)],  # as if both were of the first group
        ),
    ],
    ids=["no full attention", "blocks of other sizes", "keys made otherwise"],
)
def test_nothing_rests_on_anything_where_that_is_not_known(
    key: Any, managers: list[Any], given: list[bytes]
) -> None:
    assert PrefixGroups(key, managers).in_order(given) == (given, None)


def test_a_prefix_whose_last_state_leaves_last_has_no_more_hits() -> None:
    """A hit needs the state and all blocks before it, so to keep the state alone keeps nothing.

    What differs is which of two prefixes lost a block at a time: a hundredth either way.
    """
    pytest.importorskip("vllm")
    from integration.engine.adapters.state_order import AS_IT_IS, STATES_LAST, play

    hits = {
        order: sum(play(seed, order)["hits"] for seed in range(12))
        for order in (AS_IT_IS, STATES_LAST)
    }
    assert hits[AS_IT_IS] > 0.99 * hits[STATES_LAST] > 0
