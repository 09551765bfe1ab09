"""Random engines, and routers that lose some of their KV cache events.

Usage: python tests/integration/engine/random_streams.py FIRST COUNT [RELEASE SOURCES]

One run is one seed: some engines of `random_router.py`, as ranks of one data parallelism, each with
its own stream; commands, resets, sleep and new weights come between its batches. Several routers
read all streams: some late, some lose batches and have them replayed, or begin again without. Each
time that one has read, it must know what a router without loss knew when that very batch was
published, or a part of it where it has begun again; and what it predicts must have been there.
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

from integration.engine import random_router  # noqa: E402 - found by what is set above

_TURNS, _ROOM = 70, 1 << 20  # batches
_Asked = tuple[list[int], Any, Any]


class Rank(random_router.Oracle):
    """One engine: its stream, and what was so whenever a batch was published.

    Args:
        seed: of its engine.
        rank: among those of the same data parallelism.
        kept: of `Publisher`.

    Attributes:
        there: what both caches had when each batch was published.
        hits: prompts that were asked for behind a batch, and the tokens found of each.
    """

    def __init__(self, seed: int, rank: int, kept: int) -> None:
        from integration.engine.streams import Publisher

        super().__init__(seed)
        self.publisher = Publisher(rank, kept)
        self.there = list[Counter[tuple[str, Any, int]]]()
        self.hits = dict[int, list[tuple[_Asked, tuple[int, int]]]]()
        self.alive = True

    def publish(self, batch: Any) -> None:
        """As an `EventPublisher`."""
        from scheduler_half.replay import held

        super().publish(batch)
        self.publisher.publish(batch)
        mini = self.mini
        by_medium = held(mini.pool, None if mini.breaker.detached else mini.manager)
        self.there.append(Counter({
            (medium, key[0], (key[1:] or (0,))[0] or 0): count
            for medium, counts in by_medium.items() for key, count in counts.items()
        }))  # fmt: skip

    def check(self, _: Any = None) -> None:
        """An output was taken in."""
        super().check()
        if not self.mini.pool.kv_event_queue and self.prompts:
            asked = self._rng.sample(self.prompts, min(2, len(self.prompts)))
            self.hits[self.publisher.last] = [(one, self._find(one)) for one in asked]


class Routers:
    """All engines and routers of one run.

    Attributes:
        found: what a router knew or predicted wrongly, by what it is.
        seen: how often what could be wrong has happened.
    """

    def __init__(self, seed: int, most_in_flight: int, policies: Any) -> None:
        from integration.engine.trainer import Trainer

        self._rng = rng = random.Random(f"streams {seed}")
        self.ranks, self.trainers = list[Rank](), dict[Rank, Any]()
        for rank in range(rng.choice([1, 2, 2, 3])):
            oracle = Rank(seed, rank, rng.choice([1, 5, 40, _ROOM]))
            mini, _ = random_router.make(seed + rank, most_in_flight, policies, oracle)
            self.ranks.append(oracle)
            self.trainers[oracle] = Trainer(mini, seed + rank)
        self.readers = list[Any]()
        self.found, self.seen = Counter[str](), Counter[str]()
        self.known = random_router.known_prompts(rng)
        self._often = rng.choice([0, 0.05, 0.2])
        for _ in range(2):
            self.join()

    def join(self) -> None:
        """One more router, from now on."""
        from integration.engine.streams import Reader, Ways
        from scheduler_half.device import BLOCK

        ways = Ways(self._rng.choice([1, 3, 10, _ROOM]), self._rng.random() < 0.6)
        self.readers.append(Reader([one.publisher for one in self.ranks], ways, BLOCK))

    def play(self) -> None:
        """Requests for the engines, in turns with all that changes what they hold."""
        for _ in range(_TURNS):
            self._turn(self._rng.choice(self.ranks))
            if self._rng.random() < 0.03:
                self.join()
                self.seen["joined late"] += 1
            for reader in self.readers:
                if self._rng.random() < 0.5:
                    reader.read(self._rng, self._rng.choice([1, 2, 5, 50]))
                    self.check(reader)
            if self._rng.random() < 0.2:
                self._idle()
        self._idle()

    def _turn(self, rank: Rank) -> None:
        """One more request of an engine, some steps, and perhaps something else."""
        from integration.engine.random_control import command

        mini, rng = rank.mini, self._rng
        if not rank.alive:
            return
        with _Ending(rank, self.seen):
            rank.names.append(random_router.ask(mini, rank, rng, self.known))
            for _ in range(rng.choice([0, 1, 2, 5, 30])):
                if mini.queue or mini.scheduler.has_requests():
                    mini.step()
            random_router.disturb(mini, rng, rank.names)
            if not mini.breaker.detached:
                self.trainers[rank].disturb()
                if rng.random() < self._often:
                    command(mini, rng)

    def _idle(self) -> None:
        """Nobody asks for anything: routers read all, and one more request goes where they say."""
        for rank in self.ranks:
            if rank.alive:
                with _Ending(rank, self.seen):
                    random_router.idle(rank.mini)
        for reader in self.readers:
            reader.read_all()
            self.check(reader)
        self._route(self._rng.choice(self.readers))

    def check(self, reader: Any) -> None:
        """What a router knows was so when the last batch that it has was published."""
        for rank in self.ranks:
            known = reader.known[rank.publisher.rank]
            if known.at < 0:
                continue
            says, there = known.router.held, rank.there[known.at]
            if "medium" not in known.router.fields:
                there = Counter({key: n for key, n in there.items() if key[0] == "GPU"})
            how = "whole" if known.whole else "in part"
            self.seen[how] += 1
            self.seen[f"{how}, blocks"] += len(says)
            self.found[f"{how}: blocks that are not there"] += (says - there).total()
            if known.whole:
                self.found["whole: blocks that it does not know"] += (there - says).total()
                self.found.update({f"whole: {what}": n for what, n in known.router.wrong.items()})
            for asked, tokens in rank.hits.get(known.at, ()):
                self._compare(how, known, rank, asked, tokens)

    def _compare(
        self, how: str, known: Any, rank: Rank, asked: _Asked, there: tuple[int, int]
    ) -> None:
        media = 2 if "medium" in known.router.fields else 1
        for told, found in [*zip(self._predict(known, rank, asked), there)][:media]:
            self.seen[f"{how}, predicted"] += told > 0
            self.found[f"{how}: predicted more"] += told > found
            self.found[f"{how}: predicted less"] += known.whole and told < found

    def _predict(self, known: Any, rank: Rank, asked: _Asked) -> Any:
        return known.router.predict(*asked, random_router.groups(rank.mini.device._windows))

    def _route(self, reader: Any) -> None:
        """One request goes to the engine of which a router predicts most; nobody else asks."""
        current = [
            rank for rank in self.ranks
            if rank.alive and rank.prompts and not rank.mini.pool.kv_event_queue
            and not rank.mini.breaker.asked and "medium" in rank.router.fields
            and reader.known[rank.publisher.rank].at == rank.publisher.last
        ]  # fmt: skip
        if not current:
            return
        asked = self._rng.choice([one for rank in current for one in rank.prompts])
        tokens, salt, name = asked
        told = {r: self._predict(reader.known[r.publisher.rank], r, asked) for r in current}
        best = max(current, key=lambda rank: told[rank][1])
        mini, failed = best.mini, best.mini.manager.stats.failed
        runs = not mini.tier.paused or mini.breaker.detached
        expected = told[best][runs]
        with _Ending(best, self.seen):
            request = random_router.ask_for(mini, best, list(tokens), 1, salt, name)
            best.names.append(request)
            while request not in mini.hits:
                mini.step()
            random_router.idle(mini)
        if best.alive and mini.manager.stats.failed == failed:
            self.seen["routed"] += 1
            self.seen["routed, hit"] += expected > 0
            self.found["routed: hits less"] += mini.hits[request] < expected


class _Ending:
    """An engine may end here, as a load has failed that was promised; its tokens were right."""

    def __init__(self, rank: Rank, seen: Counter[str]) -> None:
        self._rank, self._seen = rank, seen

    def __enter__(self) -> None:
        """It is alive."""

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        from scheduler_half.device import LoadFailed

        if not isinstance(error, LoadFailed):
            return False
        assert self._rank.mini.only_right_tokens()
        self._rank.alive = False
        self._seen["ended"] += 1
        return True


def run(
    seed: int, most_in_flight: int = 6, policies: Any = ("fcfs", "fcfs", "priority")
) -> Routers:
    """One random run; as `random_router.run`.

    Raises:
        AssertionError: a wrong token, or something is left behind.
    """
    routers = Routers(seed, most_in_flight, policies)
    routers.play()
    for rank in routers.ranks:
        if rank.alive:
            with _Ending(rank, routers.seen):
                rank.mini.ask("resume")
                rank.mini.run()
                rank.mini.check()
        routers.seen["detached"] += rank.mini.breaker.detached
        routers.seen["lost"] += rank.publisher.lost
        routers.found.update(rank.found + rank.router.wrong)
        routers.seen.update(rank.router.seen)
    for reader in routers.readers:
        reader.read_all()
        routers.check(reader)
        routers.seen.update(reader.seen)
        routers.seen["completed"] += sum(known.completed for known in reader.known.values())
    return routers


def main(first: str, count: str, release: str = "", folder: str = "") -> int:
    """Play so many seeds, and say what was wrong."""
    from integration.engine.random_runs import limits_of

    limits = limits_of(release, folder)
    found, seen = Counter[str](), Counter[str]()
    for seed in range(int(first), int(first) + int(count)):
        routers = run(seed, *limits)
        found.update(routers.found)
        seen.update(routers.seen)
        if +routers.found:
            print(f"seed {seed}: {dict(+routers.found)}")
    print(f"of {dict(seen)}: {dict(+found) or 'nothing'}")
    sys.stdout.flush()
    return int(bool(+found))


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))
