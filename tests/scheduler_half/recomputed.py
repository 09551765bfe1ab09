"""What a request that was preempted computes twice: watched on vLLM's own scheduler."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

from integration.engine.mini import BLOCK, Mini

REQUESTS = 24
GPU_BLOCKS = 97
STEP_TOKENS = 64  # few, so that the free blocks that a lazy store looks at are not the whole GPU


class Preempted(NamedTuple):
    """One that waits to begin again.

    Attributes:
        tokens: that it had computed, those of steps under way included.
        keys: of its blocks that were in vLLM's prefix cache before the step that preempted it.
        lost: those of them that this step has handed out, and that are not in the tier.
    """

    tokens: int
    keys: list[Hashable]
    lost: set[Hashable]


class Watched:
    """Steps a `Mini`, and looks at each request from its preemption until it computes again.

    Attributes:
        preempted: how often requests were.
        lost: blocks that were gone with the step that preempted their request.
        blocks: of the prefix cache, that were computed twice, of each request that began again.
        tokens: that were computed twice, of each.
    """

    def __init__(self, mini: Mini) -> None:
        self._mini = mini
        self._step, mini.begin_step = mini.begin_step, self._begin_step  # type: ignore[method-assign]
        self._waiting: dict[str, Preempted] = {}
        self.preempted = self.lost = 0
        self.blocks: list[int] = []
        self.tokens: list[int] = []

    def _begin_step(self) -> Any:
        scheduler = self._mini.scheduler
        before = [(one, one.num_computed_tokens, self._cached(one)) for one in scheduler.running]
        scheduled = self._step()
        for name, one in list(self._waiting.items()):
            if name not in scheduler.requests:
                del self._waiting[name]  # the output of a step before has ended it
            elif name in scheduled.num_scheduled_tokens:
                self._resumed(scheduler.requests[name], scheduled.num_scheduled_tokens[name])
            else:
                gone = set(filter(self._is_gone, one.keys)) - one.lost
                assert not gone, f"{len(gone)} blocks of {name} were lost while it waited"
        for request, tokens, keys in before:
            if request.status.name == "PREEMPTED":
                lost = set(filter(self._is_gone, keys))
                self._waiting[request.request_id] = Preempted(tokens, keys, lost)
                self.preempted, self.lost = self.preempted + 1, self.lost + len(lost)
        return scheduled

    def _resumed(self, request: Any, scheduled: int) -> None:
        one = self._waiting.pop(request.request_id)
        begins = request.num_computed_tokens - scheduled
        self.tokens.append(max(0, one.tokens - begins))
        self.blocks.append(max(0, len(one.keys) - begins // BLOCK))

    def _cached(self, request: Any) -> list[Hashable]:
        (manager,) = self._mini.kv_manager.coordinator.single_type_managers
        blocks = manager.req_to_blocks[request.request_id]
        return [block.block_hash for block in blocks if block.block_hash is not None]

    def _is_gone(self, key: Hashable) -> bool:
        on_gpu = self._mini.view.gpu_lookup()(key) is not None
        return not (on_gpu or self._mini.manager.holds(key))


def play(seed: int, **about: Any) -> Watched:
    """Prompts of which none begin alike, and answers, which outgrow the GPU; the tier holds all."""
    rng = random.Random(seed)
    limits = {"max_num_batched_tokens": STEP_TOKENS}
    mini = Mini(blocks=GPU_BLOCKS, num_slots=4000, late=seed % 4, limits=limits, **about)
    watched = Watched(mini)
    for prompt, count, steps in _asked(rng):
        mini.add(prompt, count)
        for _ in range(steps):
            if mini.queue or mini.scheduler.has_requests():
                mini.step()
    mini.run()
    mini.check()
    assert not mini.manager.stats.evicted
    return watched


def _asked(rng: random.Random) -> Iterator[tuple[list[int], int, int]]:
    for _ in range(REQUESTS):
        length = rng.choice([2, 6, 12]) * BLOCK + rng.randrange(1, BLOCK)
        yield (
            [rng.randrange(3, 999) for _ in range(length)],
            rng.choice([60, 120, 240]),
            rng.choice([0, 0, 1, 3, 8]),
        )
