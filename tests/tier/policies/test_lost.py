"""What is remembered of evicted keys, and for how long."""

from __future__ import annotations

from kvoffload_patch.tier.policies.lost import LostKeys


def test_each_list_is_counted_and_what_comes_back_is_forgotten() -> None:
    lost = LostKeys(2)
    lost.add("abc", 0, 10)
    lost.add("de", 1, 10)
    assert lost.counts == [3, 2] and len(lost) == 5
    assert lost.forget("axd") == [1, 1]
    assert lost.counts == [2, 1] and "a" not in lost and "b" in lost


def test_nothing_is_found_where_none_is_remembered() -> None:
    lost = LostKeys(1)
    assert not lost.of("a")
    lost.add("a", 0, 10)
    assert not lost.of("bc") and lost.of("ba")


def test_whole_evictions_are_forgotten_beyond_the_limit_the_oldest_first() -> None:
    lost = LostKeys(1)
    for keys in ("abc", "de", "f", "", "g"):
        lost.add(keys, 0, 4)
    assert [key for key in "abcdefg" if key in lost] == [*"defg"]
    assert lost.counts == [4]
    lost.add("hijkl", 0, 4)
    assert not len(lost) and lost.counts == [0], "more than the limit at once"


def test_what_leaves_again_while_it_is_remembered_counts_once() -> None:
    lost = LostKeys(2)
    lost.add("ab", 0, 10)
    lost.add("bc", 1, 10)  # b was stored again by another way than that of what is computed
    assert lost.counts == [2, 1] and len(lost) == 3
    assert lost.forget("abc") == [2, 1] and lost.counts == [0, 0]


def test_nothing_is_left_of_what_is_cleared() -> None:
    lost = LostKeys(2)
    lost.add("ab", 1, 10)
    lost.clear()
    assert not len(lost) and lost.counts == [0, 0]
    lost.add("ab", 0, 2)
    assert len(lost) == 2, "old evictions count no more"
