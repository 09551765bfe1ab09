"""What a policy must do: no step costs more because the tier is larger, with any of them."""

from __future__ import annotations

from functools import partial
from itertools import count

import pytest
from tier.steps import steps_of

from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.policies import POLICIES

SMALL, LARGE, PROMPT = 512, 2048, 32  # slots, and blocks of a prompt
USES = 3


def most_steps_of_a_policy(name: str, slots: int) -> int:
    """All blocks were used several times; some evictions of one each, and the dearest of them."""
    key_of = list(range(slots))
    policy = POLICIES[name](key_of)
    for begin in range(0, slots, PROMPT):
        prompt = range(begin, begin + PROMPT)
        policy.miss(prompt)
        policy.insert(prompt)
    for begin in [*range(0, slots, PROMPT)] * USES:
        policy.hit(range(begin, begin + PROMPT))

    def one(new: int) -> None:
        policy.miss([new])
        (slot,) = policy.evict(1)
        key_of[slot] = new
        policy.insert([slot])

    return max(steps_of(partial(one, new)) for new in range(slots, slots + 8))


def most_steps_of_a_tier(name: str, slots: int) -> int:
    """As above, of a tier that knows prefixes, each loaded once as well."""
    tier = OffloadManager(slots, POLICIES[name])
    gpu_block_ids = count()
    prompts = [tuple(range(begin, begin + PROMPT)) for begin in range(0, slots, PROMPT)]

    def step(*keys: int) -> None:
        tier.make_plan(lambda block, key: True, dict(zip(keys, gpu_block_ids)))
        tier.apply(tier.drained())

    for prompt in prompts:
        step(*prompt)
        tier.request_ended(prompt)
    for prompt in prompts * USES:
        tier.touch(prompt)
    for prompt in prompts:
        tier.begin_load(prompt, [next(gpu_block_ids) for _ in prompt])
        step()
        tier.request_ended(prompt)
    assert tier.num_used == slots and not tier.stats.evicted
    most = max(steps_of(partial(step, new)) for new in range(slots, slots + 8))
    assert tier.stats.evicted == 8
    return most


@pytest.mark.parametrize("name", POLICIES)
def test_an_eviction_takes_no_more_steps_where_more_blocks_were_used(name: str) -> None:
    assert most_steps_of_a_policy(name, LARGE) <= 1.1 * most_steps_of_a_policy(name, SMALL)


@pytest.mark.parametrize("name", POLICIES)
def test_a_plan_takes_no_more_steps_where_more_blocks_were_used(name: str) -> None:
    assert most_steps_of_a_tier(name, LARGE) <= 1.1 * most_steps_of_a_tier(name, SMALL)
