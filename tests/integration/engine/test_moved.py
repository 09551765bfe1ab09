"""What a hit moves, by kinds of layers: over vLLM's own scheduler, every token compared.

`scripts/matrix features` makes a table of what is recorded here. A page is what one layer keeps for
the tokens of a block. All models have two layers: with full attention alone a block is two pages,
with two kinds of layers it is one page of either.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("vllm")

from integration.engine.mini import BLOCK, Mini  # noqa: E402
from scheduler_half.device import Chunk  # noqa: E402
from scheduler_half.scenarios import prompt  # noqa: E402

FIELD = 128  # tokens that the second kind of layer sees
SHAPES: dict[str, tuple[Any, ...]] = {
    "full attention": (None,),
    "sliding window": (None, FIELD),
    "chunks": (None, Chunk(FIELD)),
}


def needed(shape: str, blocks: int) -> int:
    """Blocks without which the next token behind a hit of so many cannot be computed."""
    if shape == "sliding window":
        return blocks + -(-(FIELD - 1) // BLOCK)
    return blocks + (blocks * BLOCK % FIELD // BLOCK if shape == "chunks" else 0)


@pytest.mark.parametrize("blocks", [12, 36, 100])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_hit_loads_and_counts_the_blocks_that_it_needs(
    shape: str, blocks: int, record_property: Any
) -> None:
    groups = SHAPES[shape]
    mini = Mini(load_mode="inline", store="eager", windows=groups, blocks=260, num_slots=1000)
    mini.only_in_cpu(prompt(blocks, seed=1))
    stats = mini.manager.stats
    stored, before = stats.stored, stats.loaded
    name = mini.add(prompt(blocks, seed=1), count=3)
    mini.run()
    mini.check()
    assert mini.hits[name] == blocks * BLOCK
    loaded = stats.loaded - before
    assert loaded == needed(shape, blocks) == sum(len(t.source_ids) for t in _loads(mini))
    pages = 2 // len(groups)
    moved = {"tokens": blocks * BLOCK, "loaded": loaded * pages, "stored": stored * pages}
    record_property("moved", json.dumps({"shape": shape, **moved}))


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_stored_is_what_hits_of_any_length_need(shape: str) -> None:
    """A prompt may end anywhere: a window before each of its ends is kept, and no block twice."""
    groups = SHAPES[shape]
    mini = Mini(load_mode="inline", store="eager", windows=groups, blocks=260, num_slots=1000)
    mini.only_in_cpu(prompt(36, seed=1))
    assert mini.manager.stats.stored == 36 * len(groups)
    for blocks in (35, 20, 9, 1):
        mini.pool.free_blocks(mini.pool.get_new_blocks(mini.pool.get_num_free_blocks()))
        name = mini.add([*prompt(blocks, seed=1, tail=0), 7], count=1)
        mini.run()
        assert mini.hits[name] == blocks * BLOCK
    mini.check()
    assert mini.manager.stats.stored == 36 * len(groups)


@pytest.mark.parametrize("shape", ["sliding window", "chunks"])
def test_room_is_asked_for_what_a_request_keeps(shape: str) -> None:
    """The prompt's 37 blocks and what its second kind of layer sees and computes, not both twice.

    So vLLM admits it with 64 blocks, and a tier that asks for 74 would let it be computed.
    """
    groups = SHAPES[shape]
    mini = Mini(load_mode="inline", store="eager", windows=groups, blocks=64, num_slots=1000)
    mini.only_in_cpu(prompt(36, seed=1))
    name = mini.add(prompt(36, seed=1), count=3)
    mini.run()
    mini.check()
    assert mini.hits[name] == 36 * BLOCK


def _loads(mini: Mini) -> list[Any]:
    """Loads of the last plan that has any."""
    return next(list(plan.before) for plan in reversed(mini.plans) if plan.before)
