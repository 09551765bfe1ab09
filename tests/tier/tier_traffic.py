"""Steps as a busy server makes them, on the rules of `tier_machine`."""

from __future__ import annotations

import random

from tier.tier_machine import BLOCKS, KEYS, TierMachine


class Traffic:
    """Many steps of the kind that a busy server makes, on the rules of a `TierMachine`.

    The rules alone seldom come to a store that is late, a block that is handed out and a forward
    pass that is early, all at once.
    """

    def __init__(self, machine: TierMachine, seed: int) -> None:
        self.machine = machine
        self.random = random.Random(seed)
        self.publishes = self.random.choice([0.1, 0.3, 0.7])
        self.waits = self.random.choice([0.0, 0.5, 0.9])  # its stores for those of steps to come
        self.favourites = [0, 0]  # which queue goes first on each rank, for a while
        machine.start(capacity=[1, 2, 3, 5, 6][seed % 5])

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._schedule()
            wanted = self.random.sample(BLOCKS, self.random.choice([0, 0, 2]))
            self.machine.end_step(wanted, can_wait=self._chance(self.waits))
            self.machine.the_state_is_that_of_the_model()
            for which in range(2):
                self._work(which)
            self._report()
            self.machine.the_state_is_that_of_the_model()
        self.machine.teardown()

    def _chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def _schedule(self) -> None:
        machine, pick = self.machine, self.random
        if self._chance(self.publishes):
            machine.publish_arrived_loads()
        ready = sorted(machine.model.ready)
        if self._chance(0.3):
            machine.touch_prefix(pick.sample(ready, min(len(ready), 3)))
        if self._chance(0.2):
            machine.hit_on_gpu(pick.sample(BLOCKS, 3))
        if self._chance(0.3):
            machine.look_at(pick.sample(BLOCKS, 3))
        if self._chance(0.1):
            machine.request_ends(pick.sample(KEYS, 4))
        free = machine.free_blocks()
        pick.shuffle(free)
        if self._chance(0.5):
            count = pick.randint(0, min(3, len(ready), len(free)))
            machine.load_prefix(pick.sample(ready, count), free, inline=self._chance(0.5))
        count = pick.choice([0, 1, 1, 2, 3])
        filled = [(pick.choice(BLOCKS), pick.choice(KEYS)) for _ in range(count)]
        machine.compute_blocks(filled, queued=self._chance(0.3))
        if self._chance(0.2):
            machine.queue_cached_block(pick.choice(BLOCKS))
        if self._chance(0.1):
            machine.uncache_block(pick.choice(BLOCKS))

    def _work(self, which: int) -> None:
        pick, rank = self.random, self.machine.ranks[which]
        if self._chance(0.1):
            self.favourites[which] = pick.randrange(3)
        favourite = self.favourites[which]
        if len(rank.steps) > 4 or (which == 0 and self._chance(0.4)):
            self.machine.rank_catches_up(which, favourite, eager=self._chance(0.5))
        pieces = pick.choice([0, 1, 2, 5, 20])
        self.machine.rank_works(which, pick.choice([0, 1, 1, 2, 2]), favourite, pieces)

    def _report(self) -> None:
        if self._chance(0.6):
            self.machine.take_in_the_result()
        if self._chance(0.1):
            self.machine._apply(self.random.choice(self.machine.reports))
        if self._chance(0.01):
            self.machine.slots_become_usable(self.random.randrange(3))
        if self._chance(0.02):
            self.machine.clear()
        if self._chance(0.02):
            self.machine.drain(self.random.randrange(3), self._chance(0.5))
