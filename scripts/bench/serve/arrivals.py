"""S4: what arriving requests do to the time between tokens of those that are being answered.

A phase has decodes that run all through it, and either nothing else (`quiet`), or sessions coming
back at a fixed rate with a new message, their KV not on the GPU any more (`arrivals`: CPU hits with
a tier, recomputed without), or still there (`gpu`: what vLLM itself takes for steps in which a
request joins). The engine is stepped here, one step after the other, and every token's time of
arrival is taken.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import cycle
from typing import TYPE_CHECKING, Any

from scripts.bench.common import quantile

if TYPE_CHECKING:
    from scripts.bench.serve.load import Bench, Prompt

WARM_TOKENS = 8  # of each decode, before a phase begins


@dataclass
class Phase:
    """What came out of one phase: times on the clock by request."""

    decodes: dict[str, list[float]]
    asked: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)

    def take(self, outputs: list[Any], now: float) -> None:
        """Note the tokens that one step gave."""
        for output in outputs:
            name = output.request_id
            if name in self.decodes:
                self.decodes[name] += [now] * len(output.outputs[0].token_ids)
            elif name in self.asked:
                self.first.setdefault(name, now)
                self.cached[name] = max(self.cached.get(name, 0), output.num_cached_tokens or 0)

    def figures(self, began: float, until: float, prompt_tokens: int) -> dict[str, Any]:
        """Milliseconds between tokens of the decodes, and to the first token of what arrived."""
        gaps = [
            1000 * (b - a)
            for times in self.decodes.values()
            for a, b in zip(times, times[1:])
            if began <= a and b <= until
        ]
        if not gaps:
            raise RuntimeError("expected tokens within a phase of S4, found none; lengthen it")
        waits = [1000 * (self.first[name] - at) for name, at in self.asked.items()]
        asked = len(self.asked)
        return {
            "p50": quantile(gaps, 0.5),
            "p99": quantile(gaps, 0.99),
            "max": max(gaps),
            "tokens_per_s": len(gaps) / (until - began),
            "arrived": asked,
            "cached": sum(self.cached.values()) / (asked * prompt_tokens) if asked else None,
            "ttft_p50": quantile(waits, 0.5) if asked else None,
            "ttft_max": max(waits) if asked else None,
        }


class Arrivals:
    """S4 on one engine: prepared once, then played phase by phase.

    Attributes:
        kinds: the phases of one round, in order.
    """

    def __init__(self, bench: Bench) -> None:
        from scripts.bench.serve.load import prompts

        size = bench.sizes
        self._bench = bench
        self._away = prompts(bench, "s4", size.s4_prompts, size.s4_tokens)
        self._near = prompts(bench, "s4-near", size.s4_resident, size.s4_tokens)
        self._rotation = cycle(self._away)
        floor = bench.floor and size.s4_resident
        self.kinds = ["quiet", "arrivals", *(["gpu"] if floor else [])]

    def prepare(self) -> list[str]:
        """Have the prompts stored, and play what only first phases pay; returns the kinds."""
        bench = self._bench
        # More than one token each: there are tiers that do not store the others.
        seconds, _ = bench.generate(self._away, 4)
        bench.say(f"S4: {len(self._away)} prompts prepared in {seconds:.1f} s")
        _run(bench, self._rotation, min(1.0, bench.sizes.s4_seconds))
        return self.kinds

    def play(self, kind: str) -> dict[str, Any]:
        """One phase, in figures."""
        bench = self._bench
        if kind == "gpu":
            bench.generate(self._near, 2)
        source = {"quiet": None, "arrivals": self._rotation, "gpu": cycle(self._near)}[kind]
        found = play(bench, source, bench.sizes.s4_seconds)
        bench.say(f"S4 {kind}: " + _words(found))
        return found


def s4(bench: Bench) -> dict[str, Any]:
    """All phases, in turn, several times."""
    arrivals = Arrivals(bench)
    phases: dict[str, list[dict[str, Any]]] = {kind: [] for kind in arrivals.prepare()}
    for turn in range(bench.sizes.s4_repeats):
        for kind in kinds_of(turn, phases, bench.sizes.s4_quiet_every):
            phases[kind].append(arrivals.play(kind))
    return phases


def kinds_of(turn: int, kinds: Iterable[str], quiet_every: int) -> list[str]:
    """The phases of a round, counted from 0: not each has a quiet one."""
    return [kind for kind in kinds if kind != "quiet" or turn % quiet_every == 0]


def play(bench: Bench, source: Any, seconds: float) -> dict[str, Any]:
    """One phase, in figures."""
    phase, began = _run(bench, source, seconds)
    return phase.figures(began, began + seconds, bench.sizes.s4_tokens)


def _run(bench: Bench, source: Any, seconds: float) -> tuple[Phase, float]:
    """One phase, and when it began; ends with no request left.

    Args:
        source: iterator over the prompts that arrive, or None.
    """
    engine, size = bench.llm.llm_engine, bench.sizes
    phase = _begin(bench)
    began = time.perf_counter()
    until, due = began + seconds, began
    gc.collect()
    gc.disable()  # a collection here would look like a long step
    try:
        while (now := time.perf_counter()) < until:
            if source is not None and now >= due:
                due += 1 / size.s4_rate
                _ask(bench, phase, next(source), now)
            outputs = engine.step()
            phase.take(outputs, time.perf_counter())
        engine.abort_request(list(phase.decodes))
        while engine.has_unfinished_requests():
            phase.take(engine.step(), time.perf_counter())
    finally:
        gc.enable()
    return phase, began


def _begin(bench: Bench) -> Phase:
    """The decodes, running: each has answered a few tokens."""
    from scripts.bench.serve.load import ask, prompts

    engine, size = bench.llm.llm_engine, bench.sizes
    bench.phases += 1
    texts = prompts(bench, f"decode-{bench.phases}", size.s4_decodes, size.s4_decode_prompt)
    phase = Phase({f"decode-{bench.phases}-{i}": [] for i in range(len(texts))})
    for name, text in zip(phase.decodes, texts):
        ask(engine, name, text, size.max_model_len - len(text))
    while min(map(len, phase.decodes.values())) < WARM_TOKENS:
        phase.take(engine.step(), time.perf_counter())
    return phase


def _ask(bench: Bench, phase: Phase, prompt: Prompt, now: float) -> None:
    """A session comes back: its prompt, and a message that is new."""
    from scripts.bench.serve.load import ask, prompts

    name = f"arrival-{bench.phases}-{len(phase.asked)}"
    (new,) = prompts(bench, name, 1, bench.sizes.s4_extend)
    phase.asked[name] = now
    ask(bench.llm.llm_engine, name, [*prompt, *new], 2)


def _words(found: dict[str, Any]) -> str:
    text = f"between tokens p50 {found['p50']:.2f}, p99 {found['p99']:.2f} ms"
    text += f", max {found['max']:.1f}, {found['tokens_per_s']:.0f} tokens/s"
    if found["arrived"]:
        text += f"; {found['arrived']} arrived, {found['cached']:.0%} cached"
        text += f", first token p50 {found['ttft_p50']:.1f} ms, max {found['ttft_max']:.1f}"
    return text
