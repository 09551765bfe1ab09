"""Requests that share beginnings, on an `OffloadManager` with any eviction policy.

A block is named by what it and those before it hold, a letter each: "abc" rests on "ab". Requests
load what the tier has of their prompt, compute the rest in several steps and end in any order. With
a window there are blocks of another group besides, where a step ends: "ABC" rests on "abc".
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tier.plans import a_result

from kvoffload_patch.links import LOAD, STORE
from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.policy import EvictionPolicy

prompts = st.text("ab", min_size=1, max_size=7)


def blocks_of(prompt: str) -> list[str]:
    """The names of its blocks, head first."""
    return [prompt[: end + 1] for end in range(len(prompt))]


def base_of(key: str) -> str:
    """What a block rests on."""
    return key.lower() if key.isupper() else key[:-1]


class Running(NamedTuple):
    """A request, and how many blocks it has found and computed."""

    prompt: str
    computed: int


class Ended(NamedTuple):
    """One whose copies may not be done."""

    prompt: str
    stores: int
    loads: int


class PrefixMachine(RuleBasedStateMachine):
    """What a request that has ended has left of its prompt leaves from its tail."""

    policy: Callable[[Sequence[Hashable]], EvictionPolicy]
    window = 0  # blocks

    @initialize(slots=st.integers(3, 12))
    def start(self, slots: int) -> None:
        self.tier = OffloadManager(slots, type(self).policy)
        self.running: list[Running] = []
        self.ended: list[Ended] = []
        self.resting: set[str] = set()  # those known to rest on the block before them
        self.orphans: set[str] = set()
        self.last_block = 0
        self.planned = [0, 0]  # loads, stores
        self.done = [0, 0]

    # What happens

    @precondition(lambda self: len(self.running) < 4)
    @rule(prompt=prompts)
    def begin(self, prompt: str) -> None:
        """A request loads what the tier has of it, up to the first block that it has not."""
        found = 0
        for key in blocks_of(prompt):
            if not self.tier.lookup(key):
                break
            found += 1
        keys = blocks_of(prompt)[:found]
        if found:
            keys += filter(self.tier.lookup, self._window(keys))
            self.tier.begin_load(keys, self._new_blocks(len(keys)))
            self.orphans.difference_update(keys)
        self.running.append(Running(prompt, found))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 3), count=st.integers(1, 3))
    def compute(self, which: int, count: int) -> None:
        """A request computes some more of its blocks."""
        number = which % len(self.running)
        request = self.running[number]
        keys = blocks_of(request.prompt)[request.computed : request.computed + count]
        self.running[number] = request._replace(computed=request.computed + len(keys))
        keys += self._window(keys)
        self._plan(dict(zip(keys, self._new_blocks(len(keys)))))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 3), together=st.booleans())
    def end(self, which: int, together: bool) -> None:
        """A request ends, perhaps before it has computed all."""
        request = self.running.pop(which % len(self.running))
        self._plan({})
        prompt = request.prompt[: request.computed]
        self.ended.append(Ended(prompt, self.planned[1], self.planned[0]))
        self._tell(prompt, together)
        self._learn()

    @rule(prompt=prompts, cached=st.booleans())
    def hit_on_gpu(self, prompt: str, cached: bool) -> None:
        """A request hits all of its prompt on the GPU, and what the tier lacks is stored."""
        keys = blocks_of(prompt)
        self.tier.hit_on_gpu(self._new_blocks(len(keys)), keys, lambda *_: cached)
        self.orphans.difference_update(keys)
        self._plan({})

    @rule(loads=st.booleans(), stores=st.booleans())
    def copies_end(self, loads: bool, stores: bool) -> None:
        for place, ended in enumerate((loads, stores)):
            self.done[place] = max(self.done[place], self.planned[place] * ended)
        self.tier.apply(a_result(*self.done))
        self._learn()

    @rule(key=prompts)
    def discard(self, key: str) -> None:
        """A block turns out to be wrong: what rests on it is as good as lost."""
        self.tier.discard(key)
        self.resting = {other for other in self.resting if base_of(other) != key}
        self._forget_what_left()

    @rule()
    def another_policy(self) -> None:
        self.tier.change_policy(type(self).policy)
        self.orphans.clear()

    # What must hold

    @invariant()
    def no_head_leaves_before_its_tail(self) -> None:
        for key in self.resting:
            assert self.tier.holds(base_of(key)), f"{key} is left without {base_of(key)}"

    def teardown(self) -> None:
        if not hasattr(self, "tier"):
            return
        for request in self.running[:]:
            self.running.remove(request)
            self._tell(request.prompt[: request.computed], together=True)
        self._plan({})
        self.tier.apply(self.tier.drained())
        assert not self.tier.busy
        # Everything can leave, the order of prefixes or not.
        self._plan({f"new {n}": block for n, block in enumerate(self._new_blocks(20))})
        assert not any(map(self.tier.holds, blocks_of("aaaaaaa") + blocks_of("bbbbbbb")))
        assert self.tier.num_used == self.tier.num_slots

    # Inside

    def _window(self, keys: list[str]) -> list[str]:
        """The other group's blocks where a hit of these ends."""
        return [key.upper() for key in keys[-self.window :]] if self.window else []

    def _tell(self, prompt: str, together: bool) -> None:
        keys = blocks_of(prompt)
        if self.window:
            rests = {key.upper(): key for key in keys}
            both = [name for key in keys for name in (key, key.upper())]
            self.tier.request_ended(both, together, rests)
        else:
            self.tier.request_ended(keys, together)

    def _new_blocks(self, count: int) -> list[int]:
        self.last_block += count
        return [*range(self.last_block - count, self.last_block)]

    def _plan(self, computed: dict[Any, int]) -> None:
        held = set(self.tier._slot_of)
        plan = self.tier.make_plan(lambda block, key: True, computed)
        for place, transfers in enumerate((plan.before, plan.after) if plan else ()):
            if transfers:
                self.planned[place] = transfers[-1].ticket
        left = held - set(self.tier._slot_of)
        if left - self.orphans:
            stay = self.orphans - left
            assert not stay, f"{left} left before {stay}, which is worth nothing"
        self._forget_what_left()

    def _forget_what_left(self) -> None:
        self.resting = set(filter(self.tier.holds, self.resting))
        self.orphans = set(filter(self.tier.holds, self.orphans))

    def _learn(self) -> None:
        """What rests on what is known once a request's copies are done, in the order of ends."""
        done = self.tier.last_done(LOAD), self.tier.last_done(STORE)
        while self.ended and self.ended[0].loads <= done[0] and self.ended[0].stores <= done[1]:
            keys = blocks_of(self.ended.pop(0).prompt)
            whole = 0
            while whole < len(keys) and self.tier.holds(keys[whole]):
                whole += 1
            others = [key.upper() for key in keys] if self.window else []
            self.resting.update(keys[1:whole], filter(self.tier.holds, others[:whole]))
            self.orphans.difference_update(keys[:whole], others[:whole])
            behind = filter(self.tier.holds, [*keys[whole:], *others[whole:]])
            self.orphans.update(key for key in behind if self._is_idle(key))

    def _is_idle(self, key: str) -> bool:
        return self.tier._is_idle(self.tier._slot_of[key])


def busy(machine: PrefixMachine, seed: int, steps: int) -> None:
    """Many requests, most of which begin like others, as the rules alone seldom make them."""
    pick = random.Random(seed)
    beginnings = ["".join(pick.choices("ab", k=pick.randrange(1, 6))) for _ in range(4)]
    machine.start(slots=pick.randrange(4, 16))
    for _ in range(steps):
        prompt = pick.choice(beginnings) + "".join(pick.choices("ab", k=pick.randrange(4)))
        happens = pick.random()
        if happens < 0.25 and len(machine.running) < 4:
            machine.begin(prompt)
        elif happens < 0.65 and machine.running:
            machine.compute(pick.randrange(4), pick.randrange(1, 4))
        elif happens < 0.75 and machine.running:
            machine.end(pick.randrange(4), together=pick.random() < 0.7)
        elif happens < 0.8:
            machine.hit_on_gpu(prompt, cached=pick.random() < 0.5)
        elif happens < 0.81:
            machine.discard(prompt)
        elif happens < 0.815:
            machine.another_policy()
        elif happens > 0.85:
            machine.copies_end(pick.random() < 0.7, pick.random() < 0.7)
        machine.no_head_leaves_before_its_tail()
    machine.teardown()
