"""Blocks used once and blocks used again: which list is evicted from, and what moves its share."""

from __future__ import annotations

from tier.policies.letters import Letters

from kvoffload_patch.tier.policies.arc import ArcPolicy


def arc_tier(slots: int) -> Letters[ArcPolicy]:
    return Letters(ArcPolicy, slots)


def test_what_was_used_once_leaves_before_what_was_used_again() -> None:
    tier = arc_tier(8)
    tier.store("abcd")
    tier.hit("ab")
    tier.store("efgh")
    assert tier.evict(7) == "cdefgab", "its share is one of eight"
    assert tier.evict(2) == "h"
    assert tier.evict(1) == ""


def test_what_a_request_computes_behind_a_prefix_used_again_counts_as_used_again() -> None:
    tier = arc_tier(8)
    tier.store("ba")
    tier.store("x")
    tier.hit("ba")
    tier.store("dc")
    tier.ended("dcba")
    assert tier.policy._lists.sizes == [1, 4]
    assert tier.evict(5) == "xdcba", "d and c were used once, and stay with a and b"


def test_a_request_that_shares_little_stays_apart_and_leaves_from_its_tail() -> None:
    tier = arc_tier(8)
    tier.store("a")
    tier.hit("a")
    tier.store("b")
    tier.store("c")
    tier.store("d")
    tier.store("x")
    tier.ended("dcba")
    assert tier.evict(3) == "xdc"
    assert tier.evict(1) == "a", "b is within the share of what was used once"


def test_the_list_that_has_lost_what_comes_again_gets_a_larger_share() -> None:
    tier = arc_tier(8)
    tier.store("abcdefgh")
    assert tier.store("i") == "a"
    tier.policy.miss("a")
    tier.hit("bcd")
    assert tier.policy.share == 2
    assert tier.evict(4) == "efgb", "two that were used once stay"
    tier.policy.miss("b")
    assert tier.policy.share == 1


def test_a_list_of_which_fewer_are_remembered_moves_the_share_further() -> None:
    tier = arc_tier(24)
    tier.store("abcdefghijklmnopqrstuvwx")
    tier.hit("wx")
    assert tier.evict(6) == "abcdef"
    tier.policy.share = 24.0
    assert tier.evict(2) == "wx"
    tier.policy.miss("w")
    assert tier.policy.share == 24 - 6 / 2
    tier.policy.miss("a")
    assert tier.policy.share == 24 - 6 / 2 + 1


def test_the_other_list_gets_more_as_well_and_no_share_is_beyond_the_tier() -> None:
    tier = arc_tier(24)
    tier.store("abcdefghijklmnopqrstuvwx")
    tier.hit("cdefgh")
    tier.policy.share = 15.0
    assert tier.evict(3) == "abi"
    tier.policy.share = 24.0
    assert tier.evict(5) == "cdefg"
    tier.policy.share = 2.0
    tier.policy.miss("a")
    assert tier.policy.share == 2 + 5 / 3
    tier.policy.miss("bi")
    assert tier.policy.share == 2 + 5 / 3 + 2 * 5 / 2
    tier.policy.share = 24.0
    assert tier.evict(1) == "h"
    tier.policy.share = 0.0
    tier.policy.miss("c")
    assert tier.policy.share == 0
    assert tier.evict(1) == "j"
    tier.policy.share = 24.0
    tier.policy.miss("j")
    assert tier.policy.share == 24


def test_what_is_new_beside_what_comes_again_is_new() -> None:
    tier = arc_tier(4)
    tier.store("abcd")
    assert tier.store("e") == "a"
    tier.store("fa")
    assert tier.policy._lists.sizes == [3, 1]
    tier.policy.remove(tier.slots("a"))
    tier.policy.insert(tier.slots("a"))
    assert tier.policy._lists.sizes == [4, 0], "it has come again once"


def test_what_comes_again_counts_as_used_again() -> None:
    tier = arc_tier(4)
    tier.store("abcd")
    assert tier.store("e") == "a"
    tier.store("a")
    assert tier.policy._lists.sizes == [3, 1]
    assert tier.evict(3) == "cda", "one that was used once stays: a has shown that more should"


def test_a_third_as_many_keys_are_remembered_as_there_are_slots() -> None:
    tier = arc_tier(12)
    for number in range(100):
        tier.store(chr(1000 + number) + chr(2000 + number))
        assert sum(tier.policy._lost.counts) <= 4
    lost = tier.policy._lost.of([*map(chr, range(1000, 2100))])
    assert len(lost) == 4
    tier.store("".join(sorted(lost)))
    assert not tier.policy._lost.of(lost)


def test_what_comes_again_and_again_is_not_remembered_many_times() -> None:
    tier = arc_tier(6)
    tier.store("abcdef")
    for key in 50 * "ghabcdef":
        if key not in tier.slot_of:
            tier.store(key)
        assert sum(tier.policy._lost.counts) <= 2


def test_what_comes_again_and_is_never_stored_is_not_remembered_for_ever() -> None:
    tier = arc_tier(6)
    for number in range(200):
        tier.store(chr(1000 + number))
        tier.policy.miss([*map(chr, range(1000, 1000 + number))])
        assert len(tier.policy._came_back) <= 6 + 4


def test_a_pinned_slot_is_not_chosen_and_was_used_again_afterwards() -> None:
    tier = arc_tier(4)
    tier.store("abcd")
    tier.policy.pin(tier.slots("b"))
    tier.hit("b")
    tier.ended("b")
    assert tier.evict(2) == "ac"
    tier.policy.unpin(tier.slots("b"))
    assert tier.evict(2) == "db"


def test_a_removed_slot_is_not_chosen() -> None:
    tier = arc_tier(4)
    tier.store("ab")
    tier.policy.remove(tier.slots("a"))
    assert tier.evict(2) == "b"


def test_slots_can_become_usable_later() -> None:
    tier = arc_tier(1)
    tier.key_of += 7 * [""]
    tier.policy.grow()
    assert tier.policy.share == 1
    tier.store("ab")
    tier.hit("a")
    assert tier.evict(2) == "ba"
