"""Plays the plan of a seed on the engine of this process; the plan is that of `random_plan`.

`asked_alone` gives plain vLLM's answers, without preemption or anything that disturbs.
`played_at_random` asks for the same while requests are aborted, the engine is paused, sleeps, or
loses its blocks, and the tier is given commands. Both are scenarios; ``TEST_RANDOM`` has the seed.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import random_plan
from random_left import left_behind
from random_requests import Answers, Sessions, ask, lora_of, one_answer, params, prompt_of

_AGAIN = 8  # requests that are asked alone at the end
_MOST_STEPS = 6000


def asked_alone(stage: Any) -> dict[str, Any]:
    """By request, what plain vLLM answers: whole, and with the likeliest tokens of each place."""
    requests = _plan().requests
    found = {str(at): _session(stage, one) for at, one in enumerate(requests) if one.turns}
    others = {str(at): one for at, one in enumerate(requests) if not one.turns}
    outputs = stage.llm.generate(
        [prompt_of(one) for one in others.values()],
        [params(one, logprobs=3) for one in others.values()],
        use_tqdm=False,
        lora_request=[lora_of(one) for one in others.values()],
    )
    for name, output in zip(others, outputs):
        found[name] = {str(one.index): one_answer(output, one) for one in output.outputs}
    return found


def _session(stage: Any, request: random_plan.Request) -> dict[str, Any]:
    """The same turns, each as a request of its own; a session forgets an answer's last token."""
    tokens: list[int] = []
    answer: list[int] = []
    for asked, count in request.turns:
        tokens += asked
        (output,) = stage.llm.generate(
            [{"prompt_token_ids": tokens}],
            params(request, max_tokens=count),
            use_tqdm=False,
            lora_request=lora_of(request),
        )
        turn = list(output.outputs[0].token_ids)
        answer += turn
        tokens = tokens + turn[:-1]
    return {"0": {"tokens": answer}}


def played_at_random(stage: Any) -> dict[str, Any]:
    """What was answered to whom, who was aborted, what is left behind, and what was seen."""
    run = _Run(stage)
    run.play()
    run.ask_again()
    run.settle()
    left = left_behind(stage) + run.commands.refused()
    return {**run.answers.result(), "left": left, "seen": run.counts()}


def _plan() -> random_plan.Plan:
    return random_plan.plan(int(os.environ["TEST_RANDOM"]))


class _Run:
    """An engine, those who ask it, and what disturbs them."""

    def __init__(self, stage: Any) -> None:
        self._stage, self._engine, self._core = stage, stage.llm.llm_engine, stage.core
        self._plan = _plan()
        self._rng = random.Random(f"play {self._plan.seed}")
        self._rate = self._rng.choice([0.3, 0.7, 1.4])
        self._next = 0
        self.seen: Counter[str] = Counter()
        self.answers = Answers()
        self.commands = _Commands(stage, self.seen)
        self._sessions = Sessions(self._engine, self._plan.requests, self.answers, self.seen)
        self._parked: set[str] = set()
        if "throttled" in self._plan.has:
            throttled = random.Random(f"throttled {self._plan.seed}")
            self._core._should_throttle_prefills = lambda: throttled.random() < 0.5
        if stage.breaker is not None:
            stage.breaker.max_failed_copies = 1 << 30  # flipped bits count as such

    def play(self) -> None:
        """Ask, step and disturb, until all has come to its end."""
        rng = self._rng
        while self._next < len(self._plan.requests):
            for _ in range(rng.choice([1, 1, 2, 4])):
                self._ask_next()
            for _ in range(rng.choice([0, 1, 1, 2, 4, 8, 20])):
                self._step_if_any()
            self._disturb()
        for _ in range(_MOST_STEPS):
            for at in self._sessions.open():
                if rng.random() < 0.5:
                    self._sessions.turn(at, self._by_priority)
            if not self._engine.has_unfinished_requests() and not self._sessions.open():
                break
            self._step()
        else:
            raise AssertionError(f"these do not come to an end: {self.answers.open()}")
        self._drain()

    def ask_again(self) -> None:
        """Some requests twice more, each alone: what the caches have by now is right."""
        self.commands.restore()
        others = [at for at, request in enumerate(self._plan.requests) if not request.turns]
        some = self._rng.sample(others, _AGAIN)
        for turn, at in [(turn, at) for turn in range(2) for at in some]:
            self._alone(f"{at} again {turn}", self._plan.requests[at])
            self.seen["asked again"] += 1
        self._drain()

    def settle(self) -> None:
        """Step with what is of no matter, until no copy is under way."""
        small = random_plan.Request([5, 6, 7], {"max_tokens": 3, "temperature": 0})
        tier = self._stage.tier
        for at in range(160):
            if tier is None or not (tier._manager.busy or tier._loads.under_way):
                return
            self._alone(f"small {at}", small)
            self._drain()

    def counts(self) -> dict[str, int]:
        """Of `EVENTS`, of what was asked, and of runs that were like this one."""
        stats, plan = self._stage.tier_stats(), self._plan
        self.seen.update({name: stats[name] for name in random_plan.COUNTED})
        self.seen["parked"] = len(self._parked)
        self.seen["preempted"] = self._stage.counter("vllm:num_preemptions")
        for at in self.answers.done():
            self.seen.update(plan.requests[at].features())
        self.seen.update(f"run: {name}" for name in plan.likeness())
        return dict(self.seen)

    @property
    def _by_priority(self) -> bool:
        return "priorities" in self._plan.has

    def _ask_next(self) -> None:
        if self._next == len(self._plan.requests):
            return
        at, request = self._next, self._plan.requests[self._next]
        self._next += 1
        if request.turns:
            self._sessions.turn(at, self._by_priority)
        else:
            ask(self._engine, str(at), request, self._by_priority)
            self.answers.asked(str(at))

    def _alone(self, name: str, request: random_plan.Request) -> None:
        ask(self._engine, name, request, self._by_priority)
        self.answers.asked(name)
        for _ in range(_MOST_STEPS):
            if not self._engine.has_unfinished_requests():
                return
            self._step()
        raise AssertionError(f"request {name} does not come to an end")

    def _step(self) -> None:
        self.seen["steps"] += 1
        for output in self._engine.step():
            self.answers.take(output)
        if self._stage.tier is not None:
            self._parked.update(self._stage.tier._loads._parked)

    def _step_if_any(self) -> None:
        if self._core.scheduler.has_requests() or self._core.batch_queue:
            self._step()

    def _drain(self) -> None:
        """Until no step is under way, and what ended in the last one is known to the tier."""
        for _ in range(12):
            self._step_if_any()

    def _disturb(self) -> None:
        rng = self._rng
        share = rng.random() / self._rate
        resets = "resets" in self._plan.has
        odds: tuple[tuple[float, Callable[[], None]], ...] = (
            (0.08, self._abort_one),
            (0.22, lambda: self.commands.give(rng, rng.choice([1, 2]))),
            (0.28, self._reset if resets else self._pause),
            (0.36, self._pause),
            (0.42, self._sleep if resets else self._pause),
            (0.46, self._call_workers),
        )
        for limit, disturb in odds:
            if share < limit:
                disturb()
                break
        if self._sessions.open() and rng.random() < 0.3:
            self._sessions.turn(rng.choice(self._sessions.open()), self._by_priority)

    def _abort_one(self) -> None:
        if self.answers.open():
            self._abort(self._rng.choice(self.answers.open()))

    def _abort(self, name: str) -> None:
        self.answers.aborted(name)
        self.seen["aborted"] += 1
        if self._sessions.abort(name):
            return
        if "aborts within a step" not in self._plan.has:
            self._engine.abort_request([name])
            return
        # As a core in a process of its own learns of it, beside a step that is under way.
        ids = self._engine.output_processor.abort_requests([name], internal=False)
        self._core.aborts_queue.put_nowait(ids)
        self.seen["aborted within a step"] += 1

    def _reset(self) -> None:
        try:
            done = self._core.reset_prefix_cache(True)
        except RuntimeError as error:
            _unless_a_session_holds_blocks(error)
            done = False
        self.seen["reset" if done else "refused reset"] += 1

    def _call_workers(self) -> None:
        """A call of a user's own, which waits for the steps under way."""
        self._engine.collective_rpc(_nothing)
        self.seen["called workers"] += 1

    def _hold(self) -> str:
        """Nothing is under way any more: what runs is kept, or aborted."""
        from vllm.v1.core.sched.interface import PauseState

        if self._rng.random() < 0.25:
            for name in self.answers.open():
                self._abort(name)
            return "abort"
        self._core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        for _ in range(20):
            if not self._core.batch_queue:
                return "keep"
            self._step()
        raise AssertionError("steps under way do not come to an end")

    def _pause(self) -> None:
        rng, mode = self._rng, self._hold()
        clears = "resets" in self._plan.has and rng.random() < 0.5

        def begin() -> None:  # as `vllm.AsyncLLM` does it
            if clears:
                self._engine.renderer.clear_mm_cache()
            self._core.pause_scheduler(mode, clears)

        if not self._held(begin):
            return
        self.seen["paused with aborts" if mode == "abort" else "paused"] += 1
        self.seen["paused with a reset"] += clears
        asks = rng.random() < 0.5
        for _ in range(rng.choice([0, 2, 4])):
            if asks:
                self._ask_next()
            self._step_if_any()
        if rng.random() < 0.3:
            self._abort_one()
        if rng.random() < 0.3:
            self.commands.give(rng, 1)
        self._core.resume_scheduler()

    def _sleep(self) -> None:
        mode = self._hold()
        if not self._held(lambda: self._engine.sleep(1, mode=mode)):
            return
        self.seen["slept with aborts" if mode == "abort" else "slept"] += 1
        if self._rng.random() < 0.5:
            self._ask_next()
        self._engine.wake_up()

    def _held(self, begin: Callable[[], object]) -> bool:
        """Whether a pause has begun; if not, all is as it was."""
        from vllm.v1.core.sched.interface import PauseState

        try:
            begin()
        except RuntimeError as error:
            _unless_a_session_holds_blocks(error)
            self.seen["refused reset"] += 1
            self._core.scheduler.set_pause_state(PauseState.UNPAUSED)
            return False
        return True


def _unless_a_session_holds_blocks(error: RuntimeError) -> None:
    """A session that waits for its next turn does, and vLLM then refuses to reset its cache."""
    if "Failed to reset KV cache" not in str(error):
        raise error


def _nothing(_: Any) -> None:
    """Runs on each worker."""


class _Commands:
    """What an operator asks of a running tier, as its socket hands it on."""

    def __init__(self, stage: Any, seen: Counter[str]) -> None:
        self._stage, self._seen = stage, seen
        self._asked: list[Any] = []
        if stage.tier is not None:
            from kvoffload_patch.integration.engine.control import Desk

            ranks = stage.tier._ranks
            self._desk = Desk(stage.breaker, stage.tier._manager, ranks, {}, lambda: None)
            self._slots, self._slot_bytes = ranks.num_slots, ranks.slot_bytes

    def give(self, rng: random.Random, count: int) -> None:
        """For the next step to carry out; plain vLLM is given none, of the same numbers."""
        kinds = ["pause", *4 * ["resume"], "empty", "resize", "resize", "set", "set"]
        for _ in range(count):
            kind, numbers = rng.choice(kinds), random.Random(rng.random())
            if self._stage.tier is not None:
                self._give(kind, numbers)

    def restore(self) -> None:
        """Let the tier have all of its room again, and store."""
        if self._stage.tier is not None:
            self._resize(self._slots)
            self._ask("resume")

    def _give(self, kind: str, rng: random.Random) -> None:
        from kvoffload_patch.config import EVICTIONS, GPU_PREFIXES, LOAD_MODES

        if kind == "resize":
            self._resize(rng.randint(1, self._slots))
        elif kind == "set":
            eviction, load_mode = rng.choice(EVICTIONS), rng.choice(LOAD_MODES)
            prefixes, stall_ms = rng.choice(GPU_PREFIXES), rng.choice([0.0, 1.0, 500.0])
            more = {"gpu_prefixes": prefixes, "max_stall_ms": stall_ms}
            self._ask(kind, eviction=eviction, load_mode=load_mode, **more)
        else:
            self._ask(kind)
        self._seen[kind] += 1

    def _resize(self, slots: int) -> None:
        self._ask("resize", gib=slots * self._slot_bytes / (1 << 30))

    def _ask(self, kind: str, **values: Any) -> None:
        from kvoffload_patch.control.commands import Command
        from kvoffload_patch.integration.engine.control import Asked

        self._asked.append(Asked(Command(kind, values)))
        self._stage.breaker.asked.append(self._asked[-1])

    def refused(self) -> list[str]:
        """Commands that were not carried out; loads that are checked first cannot be inline."""
        return [
            f"a command: {one.error or 'never answered'}"
            for one in self._asked
            if not one.done.is_set()
            or (one.error and "loads that can be checked" not in str(one.error))
        ]
