"""Random requests over vLLM's scheduler, and commands at any time: what they lose or count wrong.

Usage: python tests/integration/engine/random_control.py FIRST COUNT

Plays so many seeds, and prints what commands lost, kept or counted otherwise, and in which.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(_TESTS.parent), str(_TESTS)]

_REQUESTS, _LONGEST = 30, 340  # tokens of a prompt and its answer
_WHOLE = ("wipe", "grows")  # of `describe`: not of these runs
_KINDS = ("pause", "resume", "resume", "empty", "resize", "resize", "resize", "set", "set")
_KEEP = ("pause", "resume", "change", "gpu_emptied")  # all that is held
_COUNTED = ("capacity", "used", "stored", "loaded", "evicted")


class Control:
    """Watches a `Mini`, and compares the tier before and after each command and step.

    Attributes:
        found: blocks, or how often, by what is wrong.
        seen: how often what could be wrong has happened.
    """

    def __init__(self, mini: Any) -> None:
        from integration.engine.reports.test_metrics import FrontEnd, reported

        self._mini, self._tier, self._manager = mini, mini.tier, mini.manager
        self.front: FrontEnd = reported(mini)
        self.found, self.seen = Counter[str](), Counter[str]()
        self.within: Callable[[], Any] | None = None  # called while a step computes
        for name in (*_KEEP, "empty", "resize", "reset"):
            setattr(self._tier, name, self._around(name, getattr(self._tier, name)))
        self._step, mini.begin_step = mini.begin_step, self._begin_step

    def _begin_step(self) -> Any:
        from kvoffload_patch.integration.protocol import PLAN

        scheduled = self._step()
        plan = getattr(scheduled, PLAN, None)
        if self._tier.paused and plan is not None:
            self.found["step: copies while paused"] += len((*plan.before, *plan.after))
        self.check("step")
        if self.within is not None:
            self.within()
        return scheduled

    def _around(self, name: str, command: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            before = dict(self._manager._slot_of)
            result = command(*args)
            self.seen[name] += 1
            if name in _KEEP:
                self._is(name, before)
            elif name == "empty":
                self._is(name, {})
            elif name == "resize":
                self._is(name, {key: slot for key, slot in before.items() if slot < args[0]})
                self.seen["fit"] += min(args[0], len(before))
                self.seen["kept"] += len(self._manager._slot_of)
                self.found["resize: another size"] += self._manager.num_slots != args[0]
            self.check(name)
            return result

        return call

    def _is(self, when: str, expected: dict[Any, int]) -> None:
        self.found[f"{when}: holds others"] += len(
            expected.items() ^ self._manager._slot_of.items()
        )

    def check(self, when: str) -> None:
        """Counters and events say what the tier has."""
        manager, stats = self._manager, self._manager.stats
        writing = sum(len(keys) for _, keys, _ in manager._stores.under_way)
        failed = sum(one.blocks for link, one in stats.failed_by.items() if link[0][0] == "gpu")
        left = stats.evicted + sum(stats.removed.values())
        counted = stats.stored + writing + failed - left
        self.found[f"{when}: held otherwise"] += abs(counted - len(manager._slot_of))
        late = sum(slot < manager.num_slots for slot in manager._held.forgotten)
        self.found[f"{when}: used otherwise"] += abs(
            manager.num_used - late - len(manager._slot_of)
        )
        if self._mini.replay is not None and when != "reset":  # vLLM's own event comes behind it
            self._mini.replay.check(manager)

    def check_idle(self, when: str) -> None:
        """What the front end was told last, now that nobody asks for anything, is so."""
        manager, stats, front = self._manager, self._manager.stats, self.front
        front.drain()
        values = {"capacity": manager.num_slots, "used": manager.num_used, **vars(stats)}
        now = {f"{name}_blocks": values[name] for name in _COUNTED}
        now.update({f"removed_blocks {why}": left for why, left in stats.removed.items()})
        now.update({f"dropped_blocks {why}": lost for why, lost in stats.not_stored.items()})
        for name, value in now.items():
            self.seen["told"] += 1
            self.found[f"idle after {when}: {name}"] += abs(front[name] - value)


def command(mini: Any, rng: random.Random, kinds: Sequence[str] = _KINDS, least: int = 1) -> Any:
    """Ask for one of these at random; ``least``: slots that a resize leaves."""
    from integration.engine.mini import SLOT_BYTES

    from kvoffload_patch.config import EVICTIONS, GIB

    kind = rng.choice(kinds)
    values: dict[str, Any] = {}
    if kind == "resize":
        values = {"gib": rng.randrange(least, mini.ranks.num_slots + 1) * SLOT_BYTES / GIB}
    elif kind == "set":
        name = rng.choice(["eviction", "eviction", "gpu_prefixes", "max_stall_ms"])
        of = {"eviction": EVICTIONS, "gpu_prefixes": ["auto", "off"]}
        values = {name: rng.choice(of.get(name, [0.0, 5.0, 1000.0]))}
    return mini.ask(kind, **values)


def _make(seed: int, **more: Any) -> Any:
    from integration.engine.mini import FakeRanks, Mini
    from integration.engine.random_runs import describe

    rng = random.Random(f"control {seed}")
    about = {name: value for name, value in describe(seed).items() if name not in _WHOLE}
    ranks = FakeRanks(rng.choice([0.1, 1.0, 15.0]))
    return Mini(ranks=ranks, weighs=False, **{**about, **more})


def _ask(mini: Any, rng: random.Random, known: list[list[int]]) -> None:
    """One more request, most of which begin as others did."""
    from scheduler_half.scenarios import prompt

    beginning, count = rng.choice(known), rng.choice([1, 2, 5, 20, 60])
    own = prompt(rng.choice([0, 0, 1, 3]), rng.randrange(10**6), rng.choice([0, 1, 9]))
    asked = beginning[: rng.choice([16, 40, _LONGEST])] + own
    mini.add(asked[: _LONGEST - count], count, rng.randrange(3))
    if rng.random() < 0.5:
        known.append(asked)


def _known(rng: random.Random) -> list[list[int]]:
    from scheduler_half.scenarios import prompt

    return [prompt(rng.randrange(1, 7), rng.randrange(10**6), tail=7) for _ in range(5)]


def run(seed: int) -> Control:
    """One random run under load, with commands between and within its steps.

    Raises:
        AssertionError: a wrong token, an event that is not so, or something is left behind.
    """
    from integration.engine.trainer import Trainer
    from scheduler_half.scenarios import nothing_held

    rng, mini = random.Random(f"commands {seed}"), _make(seed, events=seed % 2 == 0)
    control, trainer, asked, known = Control(mini), Trainer(mini, seed), [], _known(rng)
    often = rng.choice([0.01, 0.1, 0.5])

    def perhaps() -> None:
        if rng.random() < often:
            asked.append(command(mini, rng))

    control.within = perhaps
    for _ in range(_REQUESTS):
        _ask(mini, rng, known)
        for _ in range(rng.choice([0, 0, 1, 2, 5, 30])):
            if mini.queue or mini.scheduler.has_requests():
                mini.step()
            perhaps()
        trainer.disturb()
        if rng.random() < 0.3:
            _idle(mini, rng, control, asked)
    control.within = None
    mini.run()
    mini.check()
    asked.append(mini.ask("resume"))
    nothing_held(mini)
    assert not mini.breaker.detached, mini.breaker.failure
    assert [one.error for one in asked if one.error or not one.done.is_set()] == []
    return control


def _idle(mini: Any, rng: random.Random, control: Control, asked: list[Any]) -> None:
    """Nobody asks for anything for a while; meanwhile perhaps a command, or a reset."""
    from integration.engine.trainer import reset

    while mini.queue or mini.scheduler.has_requests():
        mini.step()
    control.check_idle("steps")
    if rng.random() < 0.2:
        reset(mini)
        mini.device.scramble(slots=False)
        control.check_idle("reset")
    elif rng.random() < 0.5:
        asked.append(command(mini, rng))
        mini.abort("nobody")  # as an idle engine is woken
        control.check_idle(asked[-1].command.name)


def hits(seed: int, often: float) -> Counter[str]:
    """Tokens that each request of a run hits, the tier of which has room for everything.

    Args:
        seed: of the run.
        often: how likely a command follows a step: another setting, or size that is enough too.

    Raises:
        AssertionError: a wrong token, or a request that does not come to an end.
    """
    mini, rng, commands = _make(seed, num_slots=4000), *map(random.Random, (seed, seed))
    known = _known(rng)

    def step() -> None:
        if mini.queue or mini.scheduler.has_requests():
            mini.step()
            if commands.random() < often:
                command(mini, commands, ("resize", "set"), 2000)

    for _ in range(_REQUESTS):
        _ask(mini, rng, known)
        for _ in range(rng.choice([0, 0, 1, 2, 5, 30])):
            step()
    while mini.queue or mini.scheduler.has_requests():
        step()
    mini.check()
    return Counter(mini.hits)


def main(first: str, count: str) -> int:
    """Play so many seeds, and say what was wrong."""
    found, seen = Counter[str](), Counter[str]()
    for seed in range(int(first), int(first) + int(count)):
        control = run(seed)
        without, with_commands = hits(seed, 0.0), hits(seed, 0.1)
        control.found["hit without commands alone"] += (without - with_commands).total()
        control.seen["hit"] += without.total()
        found.update(control.found)
        seen.update(control.seen)
        if +control.found:
            print(f"seed {seed}: {dict(+control.found)}")
    print(f"of {dict(seen)}: {dict(+found) or 'nothing'}")
    sys.stdout.flush()
    return int(bool(+found))


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))
