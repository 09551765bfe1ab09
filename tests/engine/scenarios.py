"""What is played on a real engine. Each scenario answers with tokens and counts.

Prompts are random token ids from a seed of the scenario's own, so that an engine with the tier
and one without it are given exactly the same. Every scenario leaves no request behind.
"""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import release
from both_tiers import brought_and_kept, hits_of_both  # noqa: F401
from model import CHUNK, VOCABULARY
from pressure import under_pressure  # noqa: F401
from turns import in_turns, singles  # noqa: F401
from vllm import SamplingParams

Prompt = list[int]


class Stage:
    """An engine, and how to play on it."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.block_size: int = llm.llm_engine.vllm_config.cache_config.block_size
        core = getattr(llm.llm_engine.engine_core, "engine_core", None)
        self.core = core  # the engine core itself where it runs in this process
        breaker = getattr(core.scheduler, "_kvoffload_tier", None) if core else None
        self.breaker, self.tier = breaker, breaker and breaker.tier

    def play(self, prompts: list[Prompt], max_tokens: int = 12, **extra: Any) -> list[Any]:
        """Give prompts all at once; greedy, and exactly ``max_tokens`` long."""
        greedy = {"temperature": 0, "ignore_eos": True, "detokenize": False}
        sampling = SamplingParams(max_tokens=max_tokens, **greedy)
        salt = extra.pop("cache_salt", None)
        asked = [{"prompt_token_ids": p, **({"cache_salt": salt} if salt else {})} for p in prompts]
        return self.llm.generate(asked, sampling, use_tqdm=False, **extra)

    def push_out(self, seed: int) -> None:
        """Fill the GPU cache with other prompts."""
        self.play(prompts(seed, 8, 420), max_tokens=1)

    def counter(self, name: str, source: str | None = None) -> int:
        """One of vLLM's own counters; with a source, what it counts of that one."""
        found = [m for m in self.llm.get_metrics() if m.name == name]
        return sum(int(m.value) for m in found if not source or m.labels["source"] == source)

    def loaded_tokens(self) -> int | None:
        """Tokens found beyond the GPU's cache: vLLM's count (from 0.11.1 on), else the tier's."""
        if release.counts_external_hits():
            return self.counter("vllm:external_prefix_cache_hits")
        return self.tier_stats()["loaded"] * self.block_size if self.core else None

    def tier_stats(self) -> dict[str, Any]:
        """Counters of the tier; all 0 where there is none or it is in another process."""
        if self.tier is None:
            return dict.fromkeys(("stored", "loaded", "evicted", "dropped", "failed"), 0)
        counts = vars(self.tier._manager.stats)
        by = {" ".join((link[0], why)): n.copies for (link, why), n in counts["failed_by"].items()}
        return {**counts, "failed_by": by}


def prompts(seed: int, count: int, length: int) -> list[Prompt]:
    """Random prompts."""
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCABULARY) for _ in range(length)] for _ in range(count)]


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    """The answers."""
    return [list(o.outputs[0].token_ids) for o in outputs]


def cached_of(outputs: list[Any]) -> list[int]:
    """Prompt tokens found cached, for each request."""
    return [o.num_cached_tokens or 0 for o in outputs]


def setup(stage: Stage) -> dict[str, Any]:
    """What was really started."""
    return {
        "scheduler": type(stage.core.scheduler).__name__,
        "executor": type(stage.core.model_executor).__name__,
        "in_flight": getattr(stage.core, "batch_queue_size", 1),
        "runner": stage.llm.collective_rpc(runner)[0],
        "groups": len(stage.core.scheduler.kv_cache_config.kv_cache_groups),
        "slots": stage.tier._manager.num_slots if stage.tier else 0,
    }


def runner(worker: Any) -> str:
    """The module of a worker's model runner."""
    classes = type(worker.model_runner).__mro__
    return next(c.__module__ for c in classes if "execute_model" in vars(c))


def figures(stage: Stage) -> dict[str, float]:
    """The tier's figures where vLLM's are published, by name with labels."""
    import published

    return published.figures(lambda: stage.play(prompts(12, 1, 20), max_tokens=1))


def sensitivity(stage: Stage) -> dict[str, Any]:
    """Prompts that differ in one of their blocks, and nowhere else."""
    prompt, other = prompts(11, 2, 4 * CHUNK)
    asked = [prompt]
    for at in range(0, 3 * CHUNK, CHUNK):
        asked.append(prompt[:at] + other[at : at + CHUNK] + prompt[at + CHUNK :])
    return {"tokens": tokens_of([stage.play([p])[0] for p in asked])}


def conversations(stage: Stage) -> dict[str, Any]:
    """Ten conversations of three turns, five at a time: no prefix survives to its next turn."""
    talks, answers, cached, asked = prompts(1, 10, 380), [], 0, 0
    before = stage.loaded_tokens()
    for turn in range(3):
        for lot in (talks[:5], talks[5:]):
            outputs = stage.play(lot)
            for talk, answer in zip(lot, tokens_of(outputs)):
                answers.append(answer)
                talk += answer + prompts(100 + turn, 1, 90)[0]
            cached += sum(cached_of(outputs))
            asked += sum(len(o.prompt_token_ids) for o in outputs)
    return {
        "tokens": answers,
        "cached": cached,
        "asked": asked,
        "loaded": None if before is None else stage.loaded_tokens() - before,
        "tier": stage.tier_stats(),
    }


def router(stage: Stage) -> dict[str, int]:
    """What KV cache events have said so far is what both caches hold; blocks by kind of event."""
    import routers

    return routers.compare(stage)


def lengths(stage: Stage, together: int = 3) -> dict[str, Any]:
    """Prompts that end before, at and behind the end of a block, three times; they evict others.

    Two begin alike for two blocks; answers cross the end of a block, too.
    """
    size, answers, cached = stage.block_size, [], 0
    asked = [prompts(50 + n, 1, n)[0] for n in (size - 5, size, size + 1, 2 * size - 1, 3 * size)]
    asked += [prompts(50 + n, 1, n)[0] for n in (2 * size + size // 2, 3 * size - 3, 4 * size + 1)]
    asked += [asked[4][: 2 * size] + tail for tail in prompts(60, 2, size + 7)]
    for _ in range(3):
        for at in range(0, len(asked), together):
            outputs = stage.play(asked[at : at + together])
            answers += tokens_of(outputs)
            cached += sum(cached_of(outputs))
        stage.push_out(61)
    return {"tokens": answers, "cached": cached, "tier": stage.tier_stats()}


def batches(stage: Stage) -> dict[str, Any]:
    """Twelve prompts, four at a time, three times."""
    asked, answers, cached = 3 * prompts(15, 12, 420), [], []
    for at in range(0, len(asked), 4):
        outputs = stage.play(asked[at : at + 4])
        answers += tokens_of(outputs)
        cached += cached_of(outputs)
    return {"tokens": answers, "cached": cached, "tier": stage.tier_stats()}


def twins(stage: Stage) -> dict[str, Any]:
    """Two requests at once for the same evicted prefix of five blocks."""
    prefix = prompts(2, 1, 5 * CHUNK)[0]
    stage.play([prefix], max_tokens=1)
    stage.push_out(20)
    before = stage.tier_stats()["loaded"]
    tails = prompts(21, 2, 30)
    outputs = stage.play([prefix + tail for tail in tails])
    return {
        "tokens": tokens_of(outputs),
        "cached": cached_of(outputs),
        "blocks_loaded": stage.tier_stats()["loaded"] - before,
    }


def one_token(stage: Stage) -> dict[str, Any]:
    """Prompts answered with one token, in rotation, three times.

    Before the third time a long answer lets late copies happen: what was stored too late, after
    its GPU block had been overwritten, is then there to be hit.
    """
    asked = prompts(3, 8, 400)
    first = [stage.play([p], max_tokens=1)[0] for p in asked]
    second = [stage.play([p], max_tokens=1)[0] for p in asked]
    stage.play(prompts(30, 1, 20), max_tokens=30)
    third = [stage.play([p], max_tokens=1)[0] for p in asked]
    return {
        "tokens": tokens_of(first) + tokens_of(second) + tokens_of(third),
        "cached": cached_of(first),
        "cached_again": cached_of(third),
    }


def whole_blocks(stage: Stage) -> dict[str, Any]:
    """Prompts that end with a block, when they have left the GPU, and while they are on it."""
    asked, answers, cached, loaded = prompts(16, 3, 4 * CHUNK), [], [], []
    for turn in range(3):
        if turn < 2:
            stage.push_out(160 + turn)
        for prompt in asked:
            before = stage.tier_stats()["loaded"]
            outputs = stage.play([prompt])
            answers += tokens_of(outputs)
            cached += cached_of(outputs)
            loaded.append(stage.tier_stats()["loaded"] - before)
    return {"tokens": answers, "cached": cached, "blocks_loaded": loaded}


def preemption(stage: Stage) -> dict[str, Any]:
    """Answers that outgrow the GPU cache together."""
    before = stage.counter("vllm:num_preemptions")
    outputs = stage.play(prompts(4, 8, 360), max_tokens=40)
    return {
        "tokens": tokens_of(outputs),
        "preemptions": stage.counter("vllm:num_preemptions") - before,
    }


def salts(stage: Stage) -> dict[str, Any]:
    """The same evicted prompt under two cache salts."""
    prompt, cached, answers = prompts(5, 1, 500), [], []
    for turn, salt in enumerate(("one", "two", "one", "two")):
        outputs = stage.play(prompt, cache_salt=salt)
        cached += cached_of(outputs)
        answers += tokens_of(outputs)
        stage.push_out(50 + turn)
    return {"tokens": answers, "cached": cached}


def loras(stage: Stage) -> dict[str, Any]:
    """The same evicted prompt for the model itself and under two adapters."""
    from vllm.lora.request import LoRARequest

    folders = os.environ["TEST_LORAS"].split(os.pathsep)
    adapters = [None, *(LoRARequest(f"l{i}", i + 1, f) for i, f in enumerate(folders))]
    prompt, cached, answers = prompts(6, 1, 500), [], []
    for turn in range(2):
        for adapter in adapters:
            outputs = stage.play(prompt, lora_request=adapter)
            cached += cached_of(outputs)
            answers += tokens_of(outputs)
            stage.push_out(60 + turn)
    return {"tokens": answers, "cached": cached}


def _scale_weights(worker: Any, factor: float) -> None:
    for parameter in worker.model_runner.get_model().parameters():
        parameter.data.mul_(factor)


def reset(stage: Stage) -> dict[str, Any]:
    """Other weights between two turns, with a reset of the prefix cache, then the old ones."""
    prompt, answers, cached = prompts(7, 1, 500), [], []
    for factor in (1.0, 1.5, 1 / 1.5):
        stage.llm.collective_rpc(_scale_weights, args=(factor,))
        worked = stage.llm.reset_prefix_cache()
        for turn in range(2):
            outputs = stage.play(prompt)
            answers += tokens_of(outputs)
            cached += cached_of(outputs)
            stage.push_out(70 + turn)
        assert worked is not False, "vLLM did not reset its prefix cache"
    return {"tokens": answers, "cached": cached}


def reset_while_loading(stage: Stage) -> dict[str, Any]:
    """A reset while a request is parked for its load: the request still gets its answer."""
    prompt = prompts(8, 1, 500)[0]
    stage.play([prompt])
    stage.push_out(80)
    engine = stage.llm.llm_engine
    parked = _add_and_park(stage, "waits", prompt)
    stage.llm.collective_rpc(_scale_weights, args=(1.5,))
    worked = stage.llm.reset_prefix_cache()
    answers, cached = _finish(engine)
    stage.llm.reset_prefix_cache()
    fresh = tokens_of(stage.play([prompt], max_tokens=8))
    stage.llm.collective_rpc(_scale_weights, args=(1 / 1.5,))
    stage.llm.reset_prefix_cache()
    return {
        "tokens": answers,
        "fresh": fresh,  # what the new weights answer without any cache
        "cached": cached,
        "parked": parked,
        "reset": worked,
    }


def abort_while_loading(stage: Stage) -> dict[str, Any]:
    """Abort a parked request, then ask the same again; no block may be lost."""
    pool = stage.core.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    prompt = prompts(9, 1, 500)[0]
    first = stage.play([prompt])
    stage.push_out(90)
    parked = _add_and_park(stage, "goes", prompt)
    engine = stage.llm.llm_engine
    engine.abort_request(["goes"])
    other = stage.play([prompts(91, 1, 300)[0]])
    again = stage.play([prompt])
    return {
        "tokens": tokens_of(first) + tokens_of(other) + tokens_of(again),
        "cached": cached_of(again),
        "parked": parked,
        "blocks_lost": free - pool.get_num_free_blocks(),
        "slots_pinned": _pinned(stage),
    }


def worker_killed(stage: Stage) -> dict[str, Any]:
    """Kill rank 1 between two requests; what does the next one say?"""
    stage.play(prompts(10, 1, 300))
    pids = stage.llm.collective_rpc(_pid)
    os.kill(pids[1], signal.SIGKILL)
    try:
        outputs = stage.play(prompts(10, 1, 300))
    except Exception as error:  # noqa: BLE001 - the error is the answer
        return {"error": f"{type(error).__name__}: {error}", "pid": pids[1]}
    return {"error": "", "pid": pids[1], "tokens": tokens_of(outputs)}


def _pid(worker: Any) -> int:
    return os.getpid()


def _add_and_park(stage: Stage, request_id: str, prompt: Prompt) -> bool:
    """Add a request and step once; whether it is parked then."""
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    engine = stage.llm.llm_engine
    engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)
    engine.step()
    requests = stage.core.scheduler.requests.values()
    return any(r.status.name == "WAITING_FOR_REMOTE_KVS" for r in requests)


def _finish(engine: Any) -> tuple[list[list[int]], list[int]]:
    done = []
    while engine.has_unfinished_requests():
        done += [o for o in engine.step() if o.finished]
    return tokens_of(done), cached_of(done)


def _pinned(stage: Stage) -> int:
    if stage.tier is None:
        return 0
    manager = stage.tier._manager
    return len(manager._stores.under_way) + len(manager._held._read)


def flaky_connector(stage: Stage) -> dict[str, Any]:
    """A connector has all prompts and the tier none; loads fail; then the GPU's cache is lost.

    Answers are those of the first time, when the connector fails, and of the second, when what the
    tier has stored of the first is loaded. One that vLLM has given up is None.
    """
    rounds = [prompts(seed, 4, 450) for seed in range(300, 312)]
    first, again = [], []
    for asked in rounds:
        stage.play(asked, max_tokens=1)  # the connector stores them
        stage.llm.reset_prefix_cache()
    for at in range(0, len(rounds), 3):
        for asked in rounds[at : at + 3]:
            first += _unless_failed(stage.play(asked))
        stage.push_out(900 + at)
        loaded = stage.tier_stats()["loaded"]
        for asked in rounds[at : at + 3]:
            again += _unless_failed(stage.play(asked))
        loaded = stage.tier_stats()["loaded"] - loaded
    counts: dict[str, int] = {}
    if stage.core.scheduler.connector is not None:
        import flaky_connector as connector

        counts = connector.counts
    return {"first": first, "again": again, "blocks_loaded": loaded, **counts}


def _unless_failed(outputs: list[Any]) -> list[list[int] | None]:
    return [
        None if o.outputs[0].finish_reason == "error" else list(o.outputs[0].token_ids)
        for o in outputs
    ]
