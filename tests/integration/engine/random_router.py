"""Random engines as a router sees them: `random_router.py FIRST COUNT [RELEASE SOURCES]`.

One run is one seed. After every output that vLLM takes in, the router of `router.py` predicts what
the engine would find of some prompts, on the GPU and in CPU memory, and the engine is asked. What
is not told yet is not compared: what is done between two outputs, such as a command or an abort,
is told with the next one.

SOURCES is the folder that has the release's `vllm/`; without both it is the installed one. What a
release does not say of blocks is not asked for: adapters, salts, several KV cache groups, and
before 0.10.2 what is in CPU memory.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(_TESTS.parent), str(_TESTS)]

_REQUESTS, _LONGEST = 40, 340  # tokens of a prompt and its answer


class Oracle:
    """Reads the events of a `Mini`, predicts, and asks the engine. It is its `replay`.

    Attributes:
        found: tokens predicted otherwise than found, and what events said wrongly, by what it is.
        seen: how often what could be wrong has happened.
        prompts: what is asked for: tokens, salt, adapter.
        names: of the requests.
    """

    def __init__(self, seed: int) -> None:
        from integration.engine.router import Router
        from scheduler_half.device import BLOCK

        self._rng = random.Random(f"router {seed}")
        self.router = Router(BLOCK)
        self.found, self.seen = Counter[str](), Counter[str]()
        self.prompts: list[tuple[list[int], Any, Any]] = []
        self.names: list[str] = []
        self.mini: Any = None

    def publish(self, batch: Any) -> None:
        """As an `EventPublisher`."""
        self.router.take(batch)
        self.seen["batches"] += 1

    def check(self, _: Any = None) -> None:
        """An output was taken in."""
        if self.mini.pool.kv_event_queue:
            self.seen["behind"] += 1
            return
        for asked in self._rng.sample(self.prompts, min(2, len(self.prompts))):
            self.compare("step", asked)

    def compare(self, when: str, asked: tuple[list[int], Any, Any]) -> list[int]:
        """One prompt; returns what the router says."""
        predicted = self.router.predict(*asked, groups(self.mini.device._windows))
        media = ("GPU", "any") if "medium" in self.router.fields else ("GPU",)
        for medium, told, there in zip(media, predicted, self._find(asked)):
            self.seen[f"{medium} hit"] += there > 0
            self.seen["compared"] += 1
            if told > there:
                self.found[f"{when}: {medium}: more than there is"] += told - there
            elif told < there:
                self.found[f"{when}: {medium}: less than there is"] += there - told
        return predicted

    def check_detached(self) -> None:
        """There is no tier any more, and the router knows."""
        self.seen["detached"] += 1
        left = sum(medium == "CPU" for medium, _, _ in self.router.held)
        self.found["detached: in a tier that is gone"] += left

    def _find(self, asked: tuple[list[int], Any, Any]) -> tuple[int, int]:
        """What the engine finds: on the GPU, and with what the tier has, loads under way apart."""
        from integration.engine.random_adapters import adapter
        from scheduler_half.parts import make_request

        from kvoffload_patch.integration.engine.requests.lookup import StandInPool

        mini, (tokens, salt, name) = self.mini, asked
        lora = adapter(name, 1) if name else None
        hashed = mini.device.hashed
        request = make_request("asked", tokens, 1, 0, *hashed, salt=salt, lora_request=lora)
        # Up to 0.9.2 vLLM remembers the hashes of a name.
        getattr(mini.kv_manager, "req_to_block_hashes", {}).pop("asked", None)
        prefix = mini.view.prefix
        on_gpu = prefix.longest_hit(request, mini.pool)[1]
        if mini.breaker.detached:
            return on_gpu, on_gpu
        found = StandInPool(mini.view, mini.manager, {}, {}).look_up(request, 1 << 20).tokens
        prefix.take_search()
        return on_gpu, found


def groups(windows: Any) -> list[tuple[str, int]]:
    """KV cache groups, as a router knows them."""
    return [("full", 0) if one is None else ("window", one) if isinstance(one, int)
            else ("state", 0) for one in windows]  # fmt: skip


def make(
    seed: int, most_in_flight: int, policies: Any, oracle: Oracle | None = None
) -> tuple[Any, Oracle]:
    """The engine of a seed, with its events on, and who reads them."""
    from integration.engine.mini import FakeRanks, Mini
    from integration.engine.random_runs import describe
    from scheduler_half.replay import listen
    from scheduler_half.states import STATE

    rng, oracle = random.Random(f"routed {seed}"), oracle or Oracle(seed)
    about = {**describe(seed, most_in_flight, policies=policies), "wipe": False}
    about["windows"] = rng.choice(
        [(None,), (None,), (None,), (None, 40), (40, None), (None, STATE)]
    )
    if "group_idx" not in oracle.router.fields:
        about["windows"] = (None,)
    about["blocks"] = max(49, about["blocks"]) if len(about["windows"]) > 1 else about["blocks"]
    about["retention"] = None
    rate = {"load": rng.choice([0, 0, 0.2]), "store": rng.choice([0, 0, 0.3])}
    failing = random.Random(f"fails {seed}")

    class Heard(Mini):
        def _make_scheduler(self, *args: Any, **kwargs: Any) -> None:
            super()._make_scheduler(*args, **kwargs)
            listen(self.scheduler, oracle)

    # In a quarter of the runs with failing stores the tier is detached.
    about["max_failed_copies"] = rng.choice([3, *[1 << 30] * 3])
    ranks = FakeRanks(rng.choice([0.1, 1.0, 15.0]), compares=True)
    mini = Heard(lambda link, _: failing.random() < rate[link], ranks=ranks, weighs=False, **about)
    oracle.mini, mini.replay = mini, oracle
    return mini, oracle


def known_prompts(rng: random.Random) -> list[list[int]]:
    """With which most requests begin."""
    from scheduler_half.scenarios import prompt

    return [prompt(rng.randrange(1, 14), rng.randrange(10**6), tail=7) for _ in range(6)]


def ask(mini: Any, oracle: Oracle, rng: random.Random, known: list[list[int]]) -> str:
    """One more request, most of which begin as others did."""
    from scheduler_half.scenarios import prompt

    count = rng.choice([1, 2, 5, 20, 60])
    own = prompt(rng.choice([0, 0, 1, 3]), rng.randrange(10**6), rng.choice([0, 1, 9]))
    asked = (rng.choice(known)[: rng.choice([16, 40, _LONGEST])] + own)[: _LONGEST - count]
    salt, name = rng.choice([None, None, "salt", "more salt"]), rng.choice([None, None, "x"])
    salt = salt if "extra_keys" in oracle.router.fields else None
    name = name if "lora_name" in oracle.router.fields else None
    if rng.random() < 0.5:
        known.append(asked)
    return ask_for(mini, oracle, asked, count, salt, name, rng.randrange(3))


def ask_for(
    mini: Any, oracle: Oracle, asked: list[int], count: int, salt: Any, name: Any, priority: int = 0
) -> str:
    """One more request, of an adapter of this name if there is one."""
    from integration.engine.random_adapters import adapter

    more = {"lora_request": adapter(name, 1)} if name else {}
    oracle.prompts.append((asked, salt, name))
    return str(mini.add(asked, count, priority, salt=salt, **more))


def run(seed: int, most_in_flight: int = 6, policies: Any = ("fcfs", "fcfs", "priority")) -> Oracle:
    """One random run; ``most_in_flight``, ``policies``: that the release can have.

    Raises:
        AssertionError: a wrong token, or something is left behind.
    """
    from scheduler_half.device import LoadFailed
    from scheduler_half.scenarios import nothing_held

    mini, oracle = make(seed, most_in_flight, policies)
    try:
        _play(mini, oracle, seed)
    except LoadFailed:  # the engine ends, and what it had with it
        assert mini.only_right_tokens()
        oracle.seen["ended"] += 1
    else:
        mini.check()
        if mini.breaker.detached:
            oracle.check_detached()
        else:
            nothing_held(mini)
    oracle.found.update(oracle.router.wrong)
    oracle.seen.update(oracle.router.seen)
    oracle.seen["loaded"] += mini.manager.stats.loaded
    return oracle


def _play(mini: Any, oracle: Oracle, seed: int) -> None:
    from integration.engine.random_control import command
    from integration.engine.trainer import Trainer

    rng, trainer, names = random.Random(f"requests {seed}"), Trainer(mini, seed), oracle.names
    known, often = known_prompts(rng), rng.choice([0, 0.02, 0.2])
    for _ in range(_REQUESTS):
        names.append(ask(mini, oracle, rng, known))
        for _ in range(rng.choice([0, 0, 1, 2, 5, 30])):
            if mini.queue or mini.scheduler.has_requests():
                mini.step()
        disturb(mini, rng, names)
        if not mini.breaker.detached:
            trainer.disturb()
            if rng.random() < often:
                command(mini, rng)
        if rng.random() < 0.3:
            _alone(mini, oracle, rng, known)
    mini.ask("resume")
    mini.run()


def disturb(mini: Any, rng: random.Random, names: list[str]) -> None:
    """Abort a request, reset the prefix cache, or let others have free blocks of the GPU."""
    from integration.engine.trainer import reset

    if rng.random() < 0.08 and (name := rng.choice(names)) in mini.scheduler.requests:
        mini.abort(name)
    if rng.random() < 0.03 and not mini.queue and reset(mini):
        mini.device.scramble()
    if rng.random() < 0.2 and (free := mini.pool.get_num_free_blocks()):
        mini.pool.free_blocks(mini.pool.get_new_blocks(rng.randint(1, free)))


def _alone(mini: Any, oracle: Oracle, rng: random.Random, known: list[list[int]]) -> None:
    """Nobody else asks for anything: what the router predicts is what the request hits.

    Of a prompt of whole blocks the tier may have all but the last token, for which the router
    predicts the blocks before the last.
    """
    idle(mini)
    if rng.random() < 0.5:
        mini.pool.free_blocks(mini.pool.get_new_blocks(mini.pool.get_num_free_blocks()))
        mini.add([rng.randrange(30_000)], 1)  # what is lost is told with its output
        idle(mini)
    if mini.pool.kv_event_queue or mini.breaker.asked or "medium" not in oracle.router.fields:
        oracle.seen["behind"] += 1
        return
    for asked in oracle.prompts:
        oracle.compare("idle", asked)
    name, stats = ask(mini, oracle, rng, known), mini.manager.stats
    (tokens, *about), failed = oracle.prompts[-1], stats.failed
    gpu, both = oracle.compare("alone", (tokens, *about))
    while name not in mini.hits:
        mini.step()
    if stats.failed > failed:
        return
    expected = {gpu if mini.tier.paused and not mini.breaker.detached else both}
    if len(tokens) % mini.device.size == 0:
        expected.add(len(tokens) - 1)
    oracle.found["alone: hits otherwise"] += mini.hits[name] not in expected
    oracle.seen["alone"] += 1
    oracle.seen["alone, of the tier"] += both > gpu


def idle(mini: Any) -> None:
    """Step until nobody asks for anything."""
    while mini.queue or mini.scheduler.has_requests():
        mini.step()


def main(first: str, count: str, release: str = "", folder: str = "") -> int:
    """Play so many seeds, and say what was wrong."""
    from integration.engine.random_runs import limits_of

    limits = limits_of(release, folder)
    found, seen = Counter[str](), Counter[str]()
    for seed in range(int(first), int(first) + int(count)):
        oracle = run(seed, *limits)
        found.update(oracle.found)
        seen.update(oracle.seen)
        if +oracle.found:
            print(f"seed {seed}: {dict(+oracle.found)}")
    print(f"of {dict(seen)}: {dict(+found) or 'nothing'}")
    sys.stdout.flush()
    return int(bool(+found))


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))
