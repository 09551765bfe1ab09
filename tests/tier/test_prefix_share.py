"""Which share of a prefix is kept: what comes back in turns, soon, at random, and is lost early."""

from __future__ import annotations

import random
from collections import deque

import pytest

from kvoffload_patch.tier.prefix_share import NO_HIT, Hit, PrefixShare
from kvoffload_patch.tier.tuning import USES_MEMORY_TIMES, USES_PARTS, USES_TIMES

LENGTH, GPU, SLOTS = 32, 960, 1 << 20


def play(
    share: PrefixShare,
    chats: int,
    rounds: int,
    slots: int = SLOTS,
    room: int = GPU,
    seed: int = -1,
    free: int | None = None,
    times: int = 1,
) -> None:
    """Conversations that come back in turns, or at random, on a GPU whose heads are in a queue.

    Args:
        room: blocks of that queue.
        free: what the GPU says that nobody uses; None: as much.
        times: that each comes in a row.
    """
    source = random.Random(seed)
    held: deque[tuple[int, int]] = deque()  # chat, blocks of its head; the next to leave first
    for turn in range(rounds * chats * times):
        chat = turn // times % chats if seed < 0 else source.randrange(chats)
        keys = [(chat, at) for at in range(LENGTH)]
        on_gpu = next((blocks for one, blocks in held if one == chat), 0)
        held = deque(one for one in held if one[0] != chat)
        found = LENGTH if turn >= chats * times or turn % times else 0
        unused = room if free is None else free
        tail = share.ended(keys, Hit(found, on_gpu, share.uses), unused, slots)
        held.append((chat, LENGTH - len(tail)))
        assert share._room <= GPU
        while sum(blocks for _, blocks in held) > room:
            held.popleft()


def test_what_comes_back_in_turns_is_kept_in_part() -> None:
    share = PrefixShare(GPU)
    play(share, chats=60, rounds=12)  # twice what the GPU has
    assert 0.35 <= share.share <= 0.5


def test_a_few_long_prefixes_that_take_turns_are_kept_in_part_whatever_the_sample_has() -> None:
    gpu, length = 12_000, 512
    for seed in range(50):
        share, source, kept = PrefixShare(gpu), random.Random(seed), []
        prefixes = [[source.randbytes(36) for _ in range(length)] for _ in range(28)]
        for keys in prefixes:
            share.ended(keys, NO_HIT, gpu - length, SLOTS)
        for keys in prefixes[:20]:  # all of each has left the GPU
            share.ended(keys, Hit(length, 0, share.uses), gpu - length, SLOTS)
            kept.append(share.share)
        assert kept.count(1.0) <= 2, seed


@pytest.mark.parametrize("chats", [1, 28])
def test_what_the_gpu_has_room_for_is_kept_as_a_whole(chats: int) -> None:
    share = PrefixShare(GPU)
    play(share, chats, rounds=400 // chats)
    assert share.share == 1


def test_what_comes_back_at_random_is_kept_as_a_whole() -> None:
    share = PrefixShare(GPU)
    play(share, chats=60, rounds=12, seed=1)
    assert share.share == 1


def test_what_mostly_comes_back_at_once_is_kept_as_a_whole() -> None:
    """As much of that would be lost as heads would bring when the turn comes to them again."""
    share = PrefixShare(GPU)
    play(share, chats=60, rounds=8, times=2)
    assert share.share == 1


def test_what_never_comes_back_is_kept_as_a_whole() -> None:
    share = PrefixShare(GPU)
    for turn in range(600):
        share.ended([(turn, at) for at in range(LENGTH)], NO_HIT, GPU, SLOTS)
    assert share.share == 1


def test_no_head_is_kept_for_longer_than_the_tier_keeps_its_tail() -> None:
    share = PrefixShare(GPU)
    play(share, chats=60, rounds=12, slots=GPU + GPU // 8)
    assert share.share > 0.85


@pytest.mark.parametrize("first", [0, 1])  # one of the blocks that are looked at, or not
@pytest.mark.parametrize("alike", [1, 8])
def test_prefixes_that_begin_alike_are_kept_in_part(alike: int, first: int) -> None:
    """As with instructions that all have; few blocks are looked at where the GPU has many."""
    gpu, chats, length = 12_000, 240, 100
    share = PrefixShare(gpu)
    assert share._one_in > 16
    for turn in range(4 * chats):
        own = [(turn % chats, at) for at in range(alike, length)]
        keys = [*range(first, first + alike), *own]
        found = length if turn >= chats else 0
        share.ended(keys, Hit(found, int(share.share * found), share.uses), gpu, SLOTS)
    assert 0.3 < share.share < 0.6


def test_the_room_is_that_in_which_heads_are_found_again() -> None:
    """Requests that run take half of the GPU."""
    share = PrefixShare(GPU)
    play(share, chats=60, rounds=20, room=GPU // 2)
    assert 0.15 <= share.share <= 0.25


def test_what_is_found_again_says_how_much_room_there_is_whatever_is_free() -> None:
    """As where what requests use for a short time is free again whenever one of them ends."""
    share = PrefixShare(GPU)
    play(share, chats=60, rounds=8, room=GPU // 2, free=GPU)
    assert 0.15 <= share.share <= 0.25


def used_once() -> PrefixShare:
    """A share for 64 blocks, of which 40 requests have used four others each, kept as a whole."""
    share = PrefixShare(64)
    for turn in range(40):
        share.ended(used_by(turn), NO_HIT, 64, SLOTS, whole=True)
    assert share._one_in == 1 and share._room == 64
    return share


def used_by(turn: int) -> list[int]:
    return [4 * turn + at for at in range(4)]


def test_what_was_kept_and_lost_has_taken_more_room_than_there_is() -> None:
    share = used_once()
    share.ended(used_by(30), Hit(4, 4, share.uses), 64, SLOTS, whole=True)
    assert share._room == 64
    share.ended(used_by(30), Hit(4, 3, share.uses), 64, SLOTS)
    assert 56 <= share._room < 57, "the last one was lost at once"


@pytest.mark.parametrize("since", [4, 8])
def test_what_was_kept_and_found_has_taken_no_more_room_than_there_is(since: int) -> None:
    share = used_once()
    share._room = 24.0
    share.ended(used_by(39 - since), Hit(4, 4, share.uses), 64, SLOTS)
    assert (25 < share._room < 26) if since == 8 else 24 < share._room < 24.05


def test_what_was_lost_in_more_room_than_there_is_says_nothing() -> None:
    share = used_once()
    share._room = 24.0
    share.ended(used_by(30), Hit(4, 2, share.uses), 64, SLOTS)
    assert 24 < share._room < 24.05


def test_what_was_used_again_at_once_has_taken_no_more_room() -> None:
    share = PrefixShare(64)
    for turn in range(40):
        for found in (0, 4):
            share.ended(used_by(turn), Hit(found, found, share.uses), 64, SLOTS, whole=True)
    share._room = 24.0
    share.ended(used_by(31), Hit(4, 4, share.uses), 64, SLOTS)
    assert 25 < share._room < 26, "64 uses since, of which each second was of another block"


def test_no_less_than_nothing_is_found_and_no_more_than_all_whatever_the_sample_has() -> None:
    share = used_once()
    share._used = 2 * share._expected
    assert share._hit_ratio()(8) == 0
    share._used_again[20] = 2 * share._expected
    assert share._hit_ratio()(1000) == 1


def test_of_what_was_kept_in_part_so_much_less_has_taken_the_room() -> None:
    share = used_once()
    share.share = 0.5
    share.ended(used_by(40), NO_HIT, 64, SLOTS)
    for turn in range(41, 56):
        share.ended(used_by(turn), NO_HIT, 64, SLOTS, whole=True)
    share._room = 24.0
    share.ended(used_by(40), Hit(4, 2, share.uses), 64, SLOTS)
    assert 25 < share._room < 26, "half of 64 blocks; nor was its tail lost"


@pytest.mark.parametrize("found", [0, 1, 3])
def test_what_a_request_has_not_found_is_not_used_again(found: int) -> None:
    """The tier has lost it, and the GPU may have kept it for as long as it should."""
    share = used_once()
    share.ended(used_by(30), Hit(found, found, share.uses), 64, SLOTS)
    assert round(sum(share._used_again)) == found and share._room == 64


@pytest.mark.parametrize("before", [0, 40])
def test_what_requests_use_has_no_room_for_heads_from_the_first_return_on(before: int) -> None:
    """Also if few requests ran before, so that the GPU had more room."""
    share = PrefixShare(GPU)
    play(share, chats=before, rounds=3)
    play(share, chats=60, rounds=2, room=GPU // 2)
    assert 0.15 <= share.share <= 0.25


def test_it_learns_that_prefixes_come_back_sooner() -> None:
    share = PrefixShare(GPU)
    play(share, chats=60, rounds=12)
    assert share.share < 1
    play(share, chats=20, rounds=60)
    assert share.share == 1


def test_what_may_come_back_later_than_was_seen_is_kept_in_part_until_then() -> None:
    share, kept = PrefixShare(64), []
    for turn in range(2 * USES_TIMES * 64 // 4):
        share.ended(used_by(turn), NO_HIT, 64, SLOTS)
        kept.append(share.share)
    assert kept[40] < 0.5 and kept[-1] == 1


def test_what_was_used_long_ago_is_forgotten() -> None:
    share = PrefixShare(GPU)
    for turn in range(3000):
        share.ended([(turn, at) for at in range(LENGTH)], NO_HIT, GPU, SLOTS)
    assert len(share._last) <= (USES_TIMES + 1) * GPU / share._one_in * 1.5


@pytest.mark.parametrize("length", [1, LENGTH, 25 * GPU // USES_PARTS])
def test_old_uses_count_less_by_how_much_was_used_since(length: int) -> None:
    """Also where a request uses more than one of the parts in which uses are counted."""
    share, keys = PrefixShare(GPU), 12 * USES_MEMORY_TIMES * GPU
    for turn in range(keys // length):
        share.ended([(turn, at) for at in range(length)], NO_HIT, GPU, SLOTS)
    forgotten = USES_MEMORY_TIMES * GPU / share._one_in  # what came long ago counts for nothing
    assert 0.75 * forgotten < share._expected < 1.25 * forgotten
    assert 0.75 * forgotten < share._used < 1.25 * forgotten, "as many were in the sample"


def test_requests_that_use_a_prefix_at_the_same_time_use_it_at_once() -> None:
    """The second one had found it before the first one ended."""
    share = PrefixShare(GPU)
    for turn in range(60):
        keys = [(turn // 2, at) for at in range(LENGTH)]
        share.ended(keys, Hit(LENGTH * (turn % 2), LENGTH, share.uses - LENGTH), GPU, SLOTS)
    assert share._used_again[0] and not any(share._used_again[1:])


def test_the_tail_is_given_up_unless_the_whole_is_to_stay() -> None:
    share = PrefixShare(GPU)
    keys = [*range(10)]
    assert not share.ended(keys, NO_HIT, GPU, SLOTS)
    share.share = 0.25
    assert share.ended(keys, NO_HIT, GPU, SLOTS) == [3, 4, 5, 6, 7, 8, 9]
    assert not share.ended(keys, NO_HIT, GPU, SLOTS, whole=True)


@pytest.mark.parametrize("gpu", [1, 5, 64, GPU])
def test_what_is_remembered_of_uses_has_a_bound(gpu: int) -> None:
    """Whatever is used: a few keys always, others once, and some after a long time."""
    share, rng = PrefixShare(gpu), random.Random(gpu)
    for turn in range(4000):
        old = [("often", 0)] + [("old", rng.randrange(turn // 10 + 1)) for _ in range(4)]
        keys = [*dict.fromkeys(old), *((turn, at) for at in range(rng.randrange(20)))]
        on_gpu = rng.randrange(len(keys))
        hit = Hit(rng.randrange(on_gpu, len(keys)), on_gpu, share.uses)
        share.ended(keys, hit, rng.randrange(gpu + 1), SLOTS)
        assert 0 < share.share <= 1
        assert 0 <= share._room <= gpu
        assert len(share._last) <= USES_TIMES * max(USES_PARTS, gpu) + gpu + 50


def test_where_all_that_was_remembered_is_old_nothing_is() -> None:
    share = PrefixShare(1 << 20)
    share.ended([0], NO_HIT, 9, SLOTS)
    assert share._last
    odd = range(1, 1 << 22, 2)  # none of them is in the sample
    for _ in range(6):
        share.ended(odd, NO_HIT, 9, SLOTS)
    assert not share._last


def test_what_is_forgotten_is_the_oldest_alone() -> None:
    share = PrefixShare(64)
    for turn in range(2 * USES_TIMES):
        share.ended([64 * turn + at for at in range(64)], NO_HIT, 64, SLOTS)
    assert 0 not in share._last and 64 * 2 * USES_TIMES - 1 in share._last
    assert len(share._last) >= USES_TIMES * 64
