"""Blocks that vLLM finds and leaves out of a hit: they are loaded, or it would not find the hit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from integration.engine.mini import BLOCK, Mini
from scheduler_half.drafts import Drafter
from scheduler_half.scenarios import prompt

from kvoffload_patch.integration.engine.adapters.vllm_left_out import LeftOut


def hits(windows: tuple[int | None, ...], load_mode: str, tier: bool) -> int:
    """Tokens of a prompt of ten blocks that are hit, which the GPU has, or only the tier."""
    drafter = Drafter(2, 1, True, False)
    mini = Mini(windows=windows, drafter=drafter, blocks=120, load_mode=load_mode, tier=tier)
    asked = prompt(10, seed=5)
    if tier:
        mini.only_in_cpu(asked)
    else:
        mini.add(asked, count=1)
        mini.run()
    name = mini.add([*asked, *[9] * 20], count=3)
    mini.run()
    mini.check()
    return mini.hits[name]


@pytest.mark.parametrize("load_mode", ["inline", "parked"])
@pytest.mark.parametrize("windows", [(None,), (None, 40), (40,), (None, 40, 40), (40, 40)])
def test_beside_drafts_as_much_is_hit_as_if_the_gpu_had_it(
    windows: tuple[int | None, ...], load_mode: str
) -> None:
    assert hits(windows, load_mode, True) == hits(windows, load_mode, False) == 9 * BLOCK


def left_out(kinds: tuple[str, ...], sizes: tuple[int, ...] = (16, 16), **more: Any) -> LeftOut:
    made = [type(kind, (), {"use_eagle": True})() for kind in kinds]
    coordinator = SimpleNamespace(single_type_managers=made, **more)
    view = SimpleNamespace(
        manager=SimpleNamespace(coordinator=coordinator), block_sizes=sizes[: len(kinds)],
        key=lambda one, group: (one, group), pool=SimpleNamespace(hash_block_size=16),
    )  # fmt: skip
    return LeftOut(view)


FULL, WINDOW = "FullAttentionManager", "SlidingWindowManager"
HASHES = list("abcdefghij")


def found(made: LeftOut, asked: dict[int, str], hit: int, hashes: Any = HASHES) -> list[Any]:
    """What is behind a hit of so many blocks, where vLLM got the blocks of these hashes."""
    for one in (asked, {0: "j", 1: "j"}, asked):  # an earlier lookup is forgotten
        made.begin()
        for group, names in one.items():
            for name in names:
                made.note(group, (name, group), name.upper())
    return list(made.behind([[None] * hit] * 2, hashes))


def test_what_was_got_behind_a_hit_is_found_by_its_hash_in_whatever_order() -> None:
    assert found(left_out((FULL,)), {0: "abcde" + "abc"}, 4) == [(80, "E")]
    assert found(left_out((WINDOW,)), {0: "hgfe" + "gfe"}, 7) == [(128, "H")]
    assert found(left_out((FULL, WINDOW)), {0: "abcde", 1: "edc"}, 4) == [(80, "E"), (80, "E")]
    assert found(left_out((WINDOW,)), {0: "gfe"}, 7) == []


def test_up_to_0_19_two_groups_leave_one_out_each() -> None:
    made = left_out((FULL, "Other"), use_eagle=True)
    assert found(made, {0: "abcde"}, 3) == [(64, "D"), (80, "E")]
    assert found(made, {0: "abce"}, 3) == [], "the second is not where the first would be"


def test_where_hashes_are_of_other_blocks_full_attention_goes_by_its_order() -> None:
    made = left_out((FULL, WINDOW), sizes=(32, 32))
    assert found(made, {0: "abcde", 1: "edc"}, 4) == [(160, "E")]
    assert found(left_out((FULL,)), {0: "abcde"}, 4, ()) == [(80, "E")]
