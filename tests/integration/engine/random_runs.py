"""Random runs over vLLM's scheduler: `random_runs.py SEED SECONDS [RELEASE SOURCES [SHAPE]]`.

One run is one seed: what the engine is like, who asks for what and when, which copies fail, what is
aborted, when the prefix cache is reset, and when the engine sleeps or is given other weights. Every
token that came out must be right, every request must come to its end and hit what is there, vLLM
must be given what it would find, and nothing may be left behind.

SOURCES is the folder that has the release's `vllm/`; without both it is the installed one. SHAPE is
STATE, CHECKPOINTS, EVERY, PARTS, CHUNKS or UNCACHED; or CONNECTOR, with one of these but UNCACHED
behind a plus sign, or without; or DRAFTS likewise, with STATE, CHECKPOINTS or REPLICATED. SHARDS
before any of these with full attention, such as `shards+drafts+replicated`, has two ranks with a
part of each block. Prints JSON; status 1 if a run failed.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(_TESTS.parent), str(_TESTS)]

from integration.engine import random_shapes  # noqa: E402
from integration.engine.random_shapes import (  # noqa: E402
    CONNECTOR,
    DRAFTS,
    MAX_TOKENS,
    PARTS,
    SHAPES,
    SHARDS,
    WINDOW,
    beside_drafts,
    divided,
    groups,
    has_drafting_group,
    hashed_ahead,
    least_blocks,
    retention,
    unit,
)

Policies = tuple[str, ...]
POLICIES: Policies = ("fcfs", "fcfs", "priority")
_MAX_STEPS = 8000


def describe(
    seed: int, most_in_flight: int = 6, shape: str | None = None, policies: Policies = POLICIES,
    shards: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """What the engine of a seed is like, as arguments of `Mini`.

    Args:
        seed: of the run.
        most_in_flight: steps that the release may have under way at once.
        shape: of the KV cache: STATE, CHECKPOINTS, EVERY, PARTS, CHUNKS or UNCACHED.
        policies: of vLLM's queue, of which one is drawn.
        shards: ranks that each hold a part of every block's tokens; blocks are as many fewer.
    """
    from kvoffload_patch.config import EVICTIONS, STORES

    rng = random.Random(seed)
    in_flight = min(rng.choice([1, 2, 2, 3, 6]), most_in_flight)
    windows: tuple[Any, ...] = rng.choice([(None,), (None,), (None, WINDOW)])
    blocks = rng.choice([25, 30, 49, 80])
    limits = {}
    if rng.random() < 0.2:
        limits["long_prefill_token_threshold"] = rng.choice([20, 100])
    if rng.random() < 0.2:
        limits["watermark"] = 0.1
    if shape:
        windows = random.Random(seed).choice(groups(shape))
    if shards > 1:
        windows, blocks = divided(windows, shape), max(14, blocks // shards)
    asynchronous = in_flight > 1 and rng.random() < 0.7
    return {
        "shards": shards,
        "in_flight": in_flight,
        "asynchronous": asynchronous,
        "load_mode": rng.choice(["auto", "auto", "parked", "inline"]),
        "late": rng.randrange(4),
        "blocks": max(least_blocks(windows), blocks),
        "num_slots": rng.choice([6, 30, 100, 400]),
        "policy": rng.choice(policies),
        "windows": windows,
        "lookahead": rng.choice([0, 0, 0, 5]),
        "step_ms": rng.choice([0, 0, 3, 30]),
        "limits": limits,
        "eviction": rng.choice(EVICTIONS),
        "store": rng.choice(STORES),
        "wipe": seed % 5 == 0,
        "grows": (seed % 7 == 3) * (1 + seed % 2),
        "retention": retention(seed, windows, shape),
        "unit": unit(seed, asynchronous) if shape == PARTS else 0,
    }


class Undecided:
    """Stands for `ExclusiveGain`: at random it pays, or does not any more."""

    def __init__(self, seed: int) -> None:
        from kvoffload_patch.tier.recency_model import KeySample

        self._rng = random.Random(f"weighed {seed}")
        self._pays = False
        self.changes = 0
        self.sample = KeySample()

    @property
    def pays(self) -> bool:
        if self._rng.random() < 0.1:
            self._pays = not self._pays
            self.changes += 1
        return self._pays

    def told(self, _: object) -> None:
        pass

    resize = computed = loaded = hit_on_gpu = told


def _ranks(rng: random.Random, seed: int) -> Any:
    """In every other run a step hides most of its loads; some compare, one in five as on a CPU."""
    from integration.engine.mini import FakeRanks

    ms_per_block = rng.choice([0.1, 1.0, 15.0, 60.0])
    return FakeRanks(ms_per_block, seed % 5 > 0, overlap=0.75 * (seed % 2), compares=seed % 3 < 2)


def run(
    seed: int, most_in_flight: int = 6, shape: str | None = None, policies: Policies = POLICIES,
    shards: int = 1, connector: bool = False, drafts: bool = False,
) -> dict[str, int]:  # fmt: skip
    """One random run; returns what happened in it. The arguments are those of `describe`.

    Beside a connector and with drafts weights stay as they are: nothing is kept through sleep then.

    Raises:
        AssertionError: something is wrong, or is left behind.
    """
    from integration.engine.mini import Mini
    from integration.engine.random_found import Finds
    from integration.engine.random_users import Users
    from integration.engine.trainer import Trainer
    from scheduler_half.device import LoadFailed

    rng, users = random.Random(seed), Users(seed)
    # A number that others do not rest on: half of the runs are asked for nothing.
    commands = random.Random(f"commands {seed}") if seed % 16 < 8 and not users.alone else None
    rate = {"load": rng.choice([0, 0, 0.2, 0.5]), "store": rng.choice([0, 0, 0.3])}
    ranks, about = _ranks(rng, seed), describe(seed, most_in_flight, shape, policies, shards)
    drafter = _drafter(seed, about) if drafts else None
    mini = Mini(
        lambda direction, _: rng.random() < rate[direction], ranks=ranks, weighs=False,
        events=seed % 3 == 0 and not (drafts and shards > 1),  # which tell not of all states then
        drafter=drafter, **users.settings(about, not (drafts or connector))
    )  # fmt: skip
    mini.tier.pace.ms_per_token = 1e-6 * (seed % 35 in (5, 12, 26, 33))  # hits are computed
    gain, (given, waited) = _weighed(mini, about, seed), _looked_at(mini, seed)
    finds, trainer = Finds(mini, seed % 5 == 4), Trainer(mini, seed)
    beside = random_shapes.connector(mini, seed) if connector else None
    taught = None if connector or drafts or users.alone else trainer
    try:
        asked = _play(mini, rng, users, commands, taught, beside)
        _end(mini, beside)
    except LoadFailed:
        # A load that a step reads is a promise: the engine ends, and no wrong token has come out.
        users.check(mini, ended=True)
        assert rate["load"] and mini.only_right_tokens()
        return {**_moved(mini), "ended": 1}
    users.check(mini)
    _check(mini, finds, asked)
    return {
        **_moved(mini), **users.seen(), **_beside(drafter, beside), **trainer.seen(), **finds.seen,
        "asked": len(asked), "given": len(given), "changes": gain.changes, "waited": len(waited),
    }  # fmt: skip


def _check(mini: Any, finds: Any, asked: list[Any]) -> None:
    """What every run that has come to its end must show."""
    from scheduler_half.scenarios import nothing_held

    mini.check()
    nothing_held(mini)
    assert not (mini.breaker.detached or finds.found), (mini.breaker.failure, finds.found)
    assert [one.error for one in asked if one.error or not one.done.is_set()] == []


def _end(mini: Any, connector: Any) -> None:
    mini.run(steps=_MAX_STEPS)
    if connector is not None:
        connector.over()


def _beside(drafter: Any, connector: Any) -> dict[str, int]:
    drafted = ("accepted", "refused") if drafter is not None else ()
    brought = ("loads", "failed", "sent") if connector is not None else ()
    seen = {name: getattr(drafter, name) for name in drafted}
    return seen | {f"connector {name}": getattr(connector, name) for name in brought}


def _moved(mini: Any) -> dict[str, int]:
    """What the tier and the device have done."""
    stats, device = mini.manager.stats, mini.device
    return {
        "loaded": stats.loaded, "stored": stats.stored, "evicted": stats.evicted,
        "failed": stats.failed, "resumed": device.resumed, "replayed": device.replayed,
        "states": device.states.moved, "checkpoints": device.states.checkpoints,
        "settled": device.states.settled, "copied": device.copied,
    }  # fmt: skip


def _drafter(seed: int, about: dict[str, Any]) -> Any:
    """What drafts, and an engine that can."""
    from scheduler_half.drafts import Drafter

    beside_drafts(about)
    reads = seed % 3 > 0 or has_drafting_group(about["windows"])
    ahead = (seed % 3 > 0) * hashed_ahead(seed, about["windows"])
    return Drafter(1 + seed % 4, seed, reads, about["asynchronous"], ahead)


def _weighed(mini: Any, about: dict[str, Any], seed: int) -> Undecided:
    """In most runs with `auto`, what says whether that is lazy; in the others it always is."""
    gain = Undecided(seed)
    if about["store"] == "auto" and seed // 8 % 4:
        mini.manager._gain = gain
    return gain


def _looked_at(mini: Any, seed: int) -> tuple[list[int], list[int]]:
    """Searches that vLLM is given, and stores that wait, as `random_looks` has them.

    Where loads are compared with checksums, more of them are than in an engine.
    """
    from integration.engine.random_looks import compare, let_stores_wait

    if mini.ranks.compares:
        comparing = mini.tier._admission.comparing
        comparing._every = 2 + seed % 3
    return compare(mini), let_stores_wait(mini, seed)


def _play(
    mini: Any, rng: random.Random, users: Any, commands: random.Random | None, trainer: Any,
    connector: Any,
) -> list[Any]:  # fmt: skip
    """Forty requests, most of which begin like another one; returns what was asked meanwhile."""
    from integration.engine.mini import BLOCK
    from scheduler_half.scenarios import prompt

    beginnings = _beginnings(rng)
    names, asked_for = list[str](), list[Any]()
    # Long answers outgrow the GPU, so that requests are preempted.
    counts = rng.choice([[1, 2, 5, 20, 40], [10, 30, 50, 60]])
    for _ in range(40):
        asked = rng.choice(beginnings)
        if rng.random() < 0.15:  # whole blocks, known in full
            asked = asked[: max(1, len(asked) // BLOCK * BLOCK)]
        else:
            own = prompt(
                rng.choice([0, 0, 0, 1, 3]), rng.randrange(10**6), rng.choice([0, 0, 1, 9])
            )
            asked = asked + own
        if rng.random() < 0.05:  # more than a step takes
            asked = asked + prompt(14, seed=rng.randrange(10**6))
        count, priority = rng.choice(counts), rng.randrange(3)
        asked = asked[: MAX_TOKENS - count] or [3]
        names.append(users.add(mini, asked, count, priority))
        if connector is not None:
            connector.show(asked)
        for _ in range(rng.choice([0, 0, 1, 2, 5])):
            if mini.queue or mini.scheduler.has_requests():
                mini.step()
        _disturb(mini, rng, names, connector)
        users.disturb(mini)
        if trainer is not None:
            trainer.disturb()
        if commands is not None and commands.random() < 0.15:
            asked_for.append(_command(mini, commands))
    users.end(mini)
    return asked_for


def _beginnings(rng: random.Random) -> list[list[int]]:
    from scheduler_half.scenarios import prompt

    return [
        prompt(rng.randrange(7), seed=rng.randrange(10**6), tail=rng.choice([0, 1, 5])) or [1, 2]
        for _ in range(6)
    ]


def _disturb(mini: Any, rng: random.Random, names: list[str], connector: Any) -> None:
    """Now and then abort a request, or reset the prefix cache."""
    if rng.random() < 0.08 and (name := rng.choice(names)) in mini.scheduler.requests:
        mini.abort(name)
    if rng.random() < 0.03 and not mini.queue:
        from integration.engine.trainer import reset

        if reset(mini):
            mini.device.scramble()


def _command(mini: Any, rng: random.Random) -> Any:
    """What an operator may ask of a server, at any time."""
    from integration.engine.mini import SLOT_BYTES

    from kvoffload_patch.config import EVICTIONS, GIB, LOAD_MODES

    some = {"eviction": rng.choice(EVICTIONS), "load_mode": rng.choice(LOAD_MODES)}
    size = {"gib": rng.randrange(1, mini.ranks.num_slots + 1) * SLOT_BYTES / GIB}
    kind = rng.choice(["pause", "resume", "resume", "empty", "resize", "resize", "set"])
    return mini.ask(kind, **{"resize": size, "set": some}.get(kind, {}))


def main(
    seed: str, seconds: str, release: str = "", folder: str = "", shape: str | None = None
) -> int:
    """Run seed after seed for so long, and print what came out."""
    most, policies = limits_of(release, folder)
    asked = (shape or "").split("+")
    if unknown := [one for one in asked if one and one not in SHAPES]:
        known = ", ".join(SHAPES)
        print(f"error: expected --shape of some of {known}, found {unknown[0]!r}", file=sys.stderr)
        return 2
    beside = {"connector": CONNECTOR in asked, "drafts": DRAFTS in asked}
    shards = 2 if SHARDS in asked else 1
    shape = next((one for one in asked if one not in (CONNECTOR, DRAFTS, SHARDS)), "") or None
    end, at = 0.0, int(seed)
    failed: dict[str, str] = {}
    seen: dict[str, int] = {}
    while not end or time.monotonic() < end:
        try:
            for name, count in run(at, most, shape, policies, shards, **beside).items():
                seen[name] = seen.get(name, 0) + count
        except Exception:  # noqa: BLE001 - it is what came out
            failed[str(at)] = "".join(traceback.format_exc().splitlines(True)[-12:])
        at += 1
        # The first run imports vLLM, which takes as long as many runs.
        end = end or time.monotonic() + float(seconds)
    runs = at - int(seed)
    print(json.dumps({"release": release, "runs": runs, "seen": seen, "failed": failed}, indent=1))
    sys.stdout.flush()
    return int(bool(failed))


def limits_of(release: str = "", folder: str = "") -> tuple[int, Policies]:
    """Steps under way at most, and policies of the queue, of a release, which vLLM is from now on.

    ``folder`` has its `vllm/`. Without both it is the installed one.
    """
    if not release:
        return 6, POLICIES
    from scheduler_half import half

    half.use_release(release, Path(folder).resolve())
    return most_in_flight(release), queues(release)


def most_in_flight(release: str) -> int:
    """Steps under way: before 0.10.2 the tier refuses more than one.

    Before 0.27 vLLM's own scheduler fails here with three, with and without a tier, when a request
    is preempted: tokens of the steps under way count for what it computes then.
    """
    from packaging.version import Version

    if Version(release) < Version("0.10.2"):
        return 1
    return 2 if Version(release) < Version("0.27") else 6


def queues(release: str) -> Policies:
    """Policies of vLLM's queue: from 0.9.2 to 0.11.0 its own scheduler fails with priorities.

    With and without a tier, when a request is preempted that the same step has scheduled already.
    """
    from packaging.version import Version

    fails = Version("0.9.2") <= Version(release) < Version("0.11.1")
    return ("fcfs",) * len(POLICIES) if fails else POLICIES


if __name__ == "__main__":
    # Not by sys.exit: what vLLM has imported may keep threads of its own.
    os._exit(main(*sys.argv[1:]))
