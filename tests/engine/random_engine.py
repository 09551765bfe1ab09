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
from random_commands import Commands
from random_left import left_behind
from random_requests import Answers, Sessions, ask, lora_of, one_answer, params, prompt_of
from random_updates import Weights

_AGAIN = 8  # requests that are asked alone at the end
_MOST_STEPS = 6000


def asked_alone(stage: Any) -> dict[str, Any]:
    """By request, what plain vLLM answers: whole, and with the likeliest tokens of each place."""
    plan = _plan()
    found = _asked_alone(stage, plan, lora_of)
    if "updates" in plan.has:
        weights = Weights(stage, plan)
        rng = random.Random(plan.seed)
        weights.change(weights.choose(rng), rng)
        of_second = _asked_alone(stage, plan, weights.lora_of)
        assert of_second != found, "the two sets of weights answer alike"
        found |= {f"{name} second": answers for name, answers in of_second.items()}
    return found


def _asked_alone(
    stage: Any, plan: random_plan.Plan, lora_of: Callable[[random_plan.Request], Any]
) -> dict[str, Any]:
    requests = plan.requests
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
    return {
        **run.answers.result(),
        "second": sorted(run.second),
        "left": left,
        "seen": run.counts(),
    }


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
        self.commands = Commands(stage, self.seen)
        self._sessions = Sessions(self._engine, self._plan.requests, self.answers, self.seen)
        self._parked: set[str] = set()
        self.second: set[str] = set()
        self._weights = Weights(stage, self._plan) if "updates" in self._plan.has else None
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
            raise AssertionError(f"{random_plan.NO_END}: {self.answers.open()}")
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
            self._ask(str(at), request)
            self.answers.asked(str(at))

    def _ask(self, name: str, request: random_plan.Request) -> None:
        lora = (self._weights.lora_of if self._weights else lora_of)(request)
        ask(self._engine, name, request, self._by_priority, lora)

    def _alone(self, name: str, request: random_plan.Request) -> None:
        self._ask(name, request)
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
            if self._weights and self._weights.second:
                self.second.add(output.request_id)
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
        if self._weights and rng.random() < 0.15:
            self._update(self._weights)
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

    def _update(self, weights: Weights) -> None:
        """Give the engine other weights; those whose answers would be of both are aborted."""
        self._pause_all()
        how = weights.choose(self._rng)
        for name in self.answers.open():
            if weights.outdates(name, how) or self.answers.begun(name):
                self.answers.aborted(name)
                self._engine.abort_request([name])
                self.seen["aborted"] += 1
            else:
                self.seen["kept for new weights"] += 1
        self._drain()
        weights.change(how, self._rng)
        self.seen[how] += 1
        self._core.resume_scheduler()

    def _hold(self) -> str:
        """Nothing is under way any more: what runs is kept, or aborted."""
        if self._rng.random() < 0.25:
            for name in self.answers.open():
                self._abort(name)
            return "abort"
        self._pause_all()
        return "keep"

    def _pause_all(self) -> None:
        from vllm.v1.core.sched.interface import PauseState

        self._core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        for _ in range(20):
            if not self._core.batch_queue:
                return
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
