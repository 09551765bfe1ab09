"""python scripts/bench mechanisms --model DIR [--cycles 4] [--seconds 420] [--json FILE]

What each mechanism that exists for speed is worth: one engine, in which one of them at a time is
switched off, round by round in a seeded order, so that the machine's slow and fast phases meet all
of them alike. A round plays what users do:

  turn     every session comes back at once with a new message (more than the GPU cache holds)
  aligned, unaligned, extended
           one prompt at a time whose KV is in CPU memory: it ends on a block, it does not, it has
           200 new tokens behind it; milliseconds of a whole call for one token
  decodes  many short prompts with long answers: milliseconds of a decode step
  arrivals sessions that come back at a fixed rate beside running decodes: time between tokens
  chats    so many sessions at a time, each asked again with a new message when one is answered
  fresh    as many prompts at a time of 300 to 3,500 tokens that nobody has asked before, the same
           lengths each time: also milliseconds until all are answered
  crowd    short prompts with answers of many lengths, so many at a time, nothing of which is found
           again: milliseconds until twice as many are answered, and microseconds that the tier's
           calls took of a step, and enqueuing copies in these, and the copy thread for that

The tier must be armed: `python -m kvoffload_patch --cpu-gib 72 python scripts/bench mechanisms`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from scripts.bench import arguments
from scripts.bench.common import lacks_tier, machine, quantile, say, write_json
from scripts.bench.probes.closed_loop import Asked, ClosedLoop
from scripts.bench.probes.switches import MECHANISMS, switch_off
from scripts.bench.probes.tier_calls import tier_took
from scripts.bench.serve.load import ask, sampling

FRESH_TOKENS = 300, 3500


PARTS = ("turn", "singles", "decodes", "arrivals", "chats", "fresh", "crowd")


class Load:
    """The sessions, and what is asked of the engine."""

    def __init__(self, llm: Any, options: argparse.Namespace) -> None:
        self.llm, self.options = llm, options
        self.random = random.Random(options.seed)
        self.sessions = [self.tokens(options.tokens) for _ in range(options.sessions)]
        self.rotation = itertools.cycle(self.sessions)
        self.count = 0

    def tokens(self, count: int) -> list[int]:
        """Random token ids."""
        return [self.random.randrange(5, self.options.vocabulary) for _ in range(count)]

    def generate(self, prompts: list[list[int]], answer: int) -> float:
        """Milliseconds of one call."""
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        began = time.perf_counter()
        self.llm.generate(asked, sampling(answer), use_tqdm=False)
        return 1000 * (time.perf_counter() - began)

    def turn(self) -> float:
        """All sessions at once, each with a new message."""
        return self.generate([s + self.tokens(32) for s in self.sessions], self.options.answer)

    def singles(self) -> dict[str, list[float]]:
        """One prompt at a time, of sessions that have left the GPU; some are asked twice."""
        kinds = "aligned", "aligned, from the GPU", "unaligned", "extended"
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        first = iter(self.sessions) if "turn" in self.options.parts else self.rotation
        for _ in range(2):
            prompt = next(first)
            for kind in kinds[:2]:
                found[kind].append(self.generate([prompt], 1))
            found["unaligned"].append(self.generate([next(first)[:-5]], 1))
            found["extended"].append(self.generate([next(first)[:-100] + self.tokens(200)], 1))
        return found

    def decodes(self) -> float:
        """Milliseconds of a decode step: the longer answers less the shorter ones, per token."""
        prompts = [self.tokens(64) for _ in range(self.options.decodes)]
        short = self.generate(prompts, 2)
        prompts = [self.tokens(64) for _ in range(self.options.decodes)]
        return (self.generate(prompts, self.options.decode_tokens) - short) / (
            self.options.decode_tokens - 2
        )

    def crowd(self) -> dict[str, float]:
        """Milliseconds of short prompts with answers of many lengths, the same ones each time."""
        count, lengths = 2 * self.options.crowd, random.Random(self.options.seed)
        prompts = [{"prompt_token_ids": self.tokens(128)} for _ in range(count)]
        answers = [sampling(lengths.randrange(64, 448)) for _ in range(count)]
        self.llm.collective_rpc(tier_took)
        began = time.perf_counter()
        self.llm.generate(prompts, answers, use_tqdm=False)
        took = 1000 * (time.perf_counter() - began)
        [(calls, enqueuing, others)] = self.llm.collective_rpc(tier_took)
        return {
            "crowd": took,
            "crowd, µs a step": calls,
            "crowd, µs a step, enqueuing": enqueuing,
            "crowd, µs a step, enqueuing by the thread": others,
        }

    def arrivals(self) -> dict[str, float]:
        """Milliseconds between the tokens of running decodes while sessions come back."""
        engine, options = self.llm.llm_engine, self.options
        self.count += 1
        names = [f"decode-{self.count}-{i}" for i in range(options.decodes // 2)]
        last: dict[str, float] = {}
        gaps: list[float] = []
        asked: dict[str, float] = {}
        waits: list[float] = []
        for name in names:
            ask(engine, name, self.tokens(64), options.max_tokens - 64)
        returning = iter(self.sessions[6:])
        while len(last) < len(names):
            note(engine.step(), last, [], {}, [])
        began = due = time.perf_counter()
        while (now := time.perf_counter()) < began + options.phase:
            if now >= due and (session := next(returning, None)):
                due += 1 / options.rate
                name = f"arrival-{self.count}-{len(asked)}"
                asked[name] = now
                ask(engine, name, session + self.tokens(32), 2)
            note(engine.step(), last, gaps, asked, waits)
        engine.abort_request(names)
        while engine.has_unfinished_requests():
            engine.step()
        gaps.sort()
        return {
            "between tokens p50": gaps[len(gaps) // 2],
            "between tokens p99": gaps[int(len(gaps) * 0.99)],
            "between tokens largest": gaps[-1],
            "first token p50": statistics.median(waits) if waits else float("nan"),
            "first token p90": statistics.quantiles(waits, n=10)[-1] if waits[1:] else float("nan"),
        }

    def chats(self) -> dict[str, float]:
        """Sessions that come back one by one: milliseconds to the first token, and per token."""

        def ask() -> Asked:
            new = self.tokens(self.random.randrange(60, 180))
            return self.named("chat"), next(self.rotation) + new, self.random.randrange(32, 96)

        until = time.perf_counter() + self.options.phase
        return self.answered("chats", ask, lambda: time.perf_counter() < until)

    def fresh(self) -> dict[str, float]:
        """Prompts that nobody has asked before, in the same way, and milliseconds for all."""
        lengths, left = random.Random(self.options.seed), self.options.fresh

        def ask() -> Asked:
            nonlocal left
            left -= 1
            new = self.tokens(lengths.randrange(*FRESH_TOKENS))
            return self.named("fresh"), new, lengths.randrange(32, 96)

        began = time.perf_counter()
        found = self.answered("fresh", ask, lambda: left > 0)
        return {**found, "fresh, all": 1000 * (time.perf_counter() - began)}

    def named(self, kind: str) -> str:
        """A name that no request has had."""
        self.count += 1
        return f"{kind}-{self.count}"

    def answered(
        self, kind: str, ask: Callable[[], Asked], goes_on: Callable[[], bool]
    ) -> dict[str, float]:
        """So many at a time while it goes on; milliseconds to first tokens, and per token.

        The first of each client do not count: these come together.
        """
        asked: dict[str, float] = {}
        first: dict[str, tuple[float, int]] = {}  # when, and how many tokens came then
        waits, per_token = list[float](), list[float]()

        def asks() -> Asked:
            request = ask()
            asked[request[0]] = time.perf_counter()
            return request

        loop = ClosedLoop(self.llm.llm_engine, self.options.at_once, asks)
        loop.fill(goes_on)
        while loop.busy:
            for output in loop.step():
                now, name = time.perf_counter(), output.request_id
                count = len(output.outputs[0].token_ids)
                if name not in first:
                    first[name] = now, 0
                    if len(first) > self.options.at_once:
                        waits.append(1000 * (now - asked[name]))
                else:
                    first[name] = first[name][0], first[name][1] + count
                if output.finished:
                    per_token.append(1000 * (now - first[name][0]) / max(1, first[name][1]))
            loop.fill(goes_on)
        found = {"first token": waits, "per token": per_token}
        return {
            f"{kind}, {name}, p{share}": quantile(values, share / 100)
            for name, values in found.items()
            for share in (50, 90)
        }


def note(outputs: Any, last: dict[str, float], gaps: list[float], asked: dict[str, float],
         waits: list[float]) -> None:  # fmt: skip
    """Note when tokens came."""
    now = time.perf_counter()
    for output in outputs:
        name = output.request_id
        if name.startswith("decode"):
            if name in last:
                gaps.append(1000 * (now - last[name]))
            last[name] = now
        elif name in asked:
            waits.append(1000 * (now - asked.pop(name)))


def play(load: Load, mechanism: str) -> dict[str, Any]:
    """One round."""
    load.llm.collective_rpc(switch_off, args=(mechanism,))
    found: dict[str, Any] = {"without": mechanism}
    parts = load.options.parts
    if "turn" in parts:
        found["turn"] = load.turn()
    if "singles" in parts:
        found.update(load.singles())
    if "decodes" in parts:
        found["decode step"] = load.decodes()
    if "arrivals" in parts:
        found.update(load.arrivals())
    if "chats" in parts:
        found.update(load.chats())
    if "fresh" in parts:
        found.update(load.fresh())
    if "crowd" in parts:
        found.update(load.crowd())
    return found


def report(rounds: list[dict[str, Any]]) -> str:
    """Medians with the smallest and the largest, as a Markdown table."""
    figures = [name for name in rounds[0] if name != "without"]
    lines = ["| without | rounds | " + " | ".join(figures) + " |"]
    lines.append("| --- | ---: |" + " ---: |" * len(figures))
    for mechanism in MECHANISMS:
        own = [r for r in rounds if r["without"] == mechanism]
        if not own:
            continue
        cells = []
        for name in figures:
            values = [v for r in own for v in (r[name] if isinstance(r[name], list) else [r[name]])]
            middle, low, high = statistics.median(values), min(values), max(values)
            cells.append(f"{middle:.4g} ({low:.4g} to {high:.4g})")
        lines.append(f"| {mechanism} | {len(own)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def options_given() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=arguments.model, required=True)
    parser.add_argument("--engine", type=arguments.settings, default={})
    parser.add_argument("--cycles", type=arguments.whole(1), default=4)
    parser.add_argument("--seconds", type=arguments.positive, default=420.0)
    parser.add_argument("--sessions", type=arguments.whole(1), default=60)
    parser.add_argument("--tokens", type=arguments.whole(1), default=8192)
    parser.add_argument("--answer", type=arguments.whole(1), default=32)
    parser.add_argument("--decodes", type=arguments.whole(1), default=64)
    parser.add_argument("--decode-tokens", type=arguments.whole(1), default=96)
    parser.add_argument("--crowd", type=arguments.whole(1), default=256)
    parser.add_argument("--fresh", type=arguments.whole(1), default=60)
    parser.add_argument("--max-tokens", type=arguments.whole(1), default=12000)
    parser.add_argument("--at-once", type=arguments.whole(1), default=12)
    parser.add_argument("--rate", type=arguments.positive, default=5.0)
    parser.add_argument("--phase", type=arguments.positive, default=3.5)
    parser.add_argument("--vocabulary", type=arguments.whole(1), default=100_000)
    parser.add_argument("--settle", type=arguments.least_zero, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=arguments.some(MECHANISMS), default=",".join(MECHANISMS))
    parser.add_argument("--parts", type=arguments.some(PARTS), default=",".join(PARTS[:5]))
    parser.add_argument("--json", type=arguments.written)
    return parser.parse_args()


def main() -> int:
    """Play cycles until the time is over."""
    options = options_given()
    if lacks_tier("mechanisms"):
        return 2
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    from vllm import LLM

    began = time.perf_counter()
    llm = LLM(str(options.model), **options.engine)
    say(f"engine: {time.perf_counter() - began:.1f} s")
    load, began = Load(llm, options), time.perf_counter()
    say(f"cold turn: {load.turn():.0f} ms")
    time.sleep(options.settle)
    play(load, "nothing")
    rounds: list[dict[str, Any]] = []
    for _ in range(options.cycles):
        order = [*options.only, "nothing"]
        load.random.shuffle(order)
        for mechanism in order:
            if time.perf_counter() - began > options.seconds:
                break
            rounds.append(play(load, mechanism))
            say(json.dumps(rounds[-1]))
            write_json(options.json, {"machine": machine(), "rounds": rounds})
    say(report(rounds))
    return 0
