"""Scenarios that one feature of vLLM needs; the rest of them, and how they work, in `scenarios`."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import psutil
from closeness import OUTGROWN, behind_the_best, long_answers, outgrown_behind_the_best  # noqa: F401
from commanded import commanded  # noqa: F401
from flipped import flipped_bits  # noqa: F401
from hanging import (  # noqa: F401
    hangs_while_idle,
    hangs_while_reset,
    is_left_hanging,
    waits_for_a_hung_load,
)
from random_engine import asked_alone, played_at_random  # noqa: F401
from restarting import restarts  # noqa: F401
from scenarios import Stage, cached_of, lengths, prompts, runner, tokens_of
from sleeping import sleeps, sleeps_twice, updates  # noqa: F401
from slow_bus import slow_bus  # noqa: F401
from vllm import SamplingParams

_LOST_S = 60.0
_AT_WORK_S = 0.5
_BY_CONNECTORS = ("vllm:prompt_tokens_by_source", "external_kv_transfer")


def guesses(stage: Stage, together: int = 2) -> dict[str, Any]:
    """Long answers, twice; the prompts leave the GPU between. Drafts, and those accepted."""
    asked, answers, cached = prompts(17, 6, 388), [], []
    for at, prompt in enumerate(asked):
        prompt += 2 * list(range(4 + 6 * at, 10 + 6 * at))  # a ring of `drafts`, to be looked up
    counters = ("drafts", "draft_tokens", "accepted_tokens")
    counted = []
    for turn in range(2):
        before = [stage.counter(f"vllm:spec_decode_num_{name}") for name in counters]
        for at in range(0, len(asked), together):
            outputs = stage.play(asked[at : at + together], max_tokens=32)
            answers += tokens_of(outputs)
            cached += cached_of(outputs)
        after = [stage.counter(f"vllm:spec_decode_num_{name}") for name in counters]
        counted.append([b - a for a, b in zip(before, after)])
        stage.push_out(170 + turn)
    return {"tokens": answers, "cached": cached, "counted": counted, "tier": stage.tier_stats()}


def guesses_alone(stage: Stage) -> dict[str, Any]:
    """The same, one prompt at a time."""
    return guesses(stage, together=1)


def lengths_alone(stage: Stage) -> dict[str, Any]:
    """Prompts that end before, at and behind the end of a block, each asked alone."""
    return lengths(stage, together=1)


def outgrown(stage: Stage) -> dict[str, Any]:
    """Answers that outgrow the GPU cache together.

    ``late``: copies that `late_copies` has held up on the devices.
    """
    before = stage.counter("vllm:num_preemptions")
    outputs = stage.play(OUTGROWN, max_tokens=160)
    return {
        "tokens": tokens_of(outputs),
        "preemptions": stage.counter("vllm:num_preemptions") - before,
        "late": sum(stage.core.model_executor.collective_rpc(_held_up)),
        "tier": stage.tier_stats(),
    }


def adapter_loaded_again(stage: Stage, unloaded: bool = False) -> dict[str, Any]:
    """An evicted prompt under one adapter, and under another that is loaded under its name.

    As a trainer does it where a release has that, in place: other weights are written to the same
    folder. Else as a user: from another folder, under another number. If it was ``unloaded``: from
    the same folder, under another number, as vLLM's API server loads it then.
    """
    import shutil

    from vllm.lora.request import LoRARequest

    first, second = os.environ["TEST_LORAS"].split(os.pathsep)
    folder, prompt, answers, cached = f"{first}-again", prompts(6, 1, 500), [], []
    shutil.copytree(first, folder)
    named = LoRARequest("again", 1, folder)
    for turn in range(6):
        if turn == 2 and unloaded:
            shutil.copytree(second, folder, dirs_exist_ok=True)
            named = LoRARequest("again", 2, folder)
        elif turn == 2 and hasattr(named, "load_inplace"):
            shutil.copytree(second, folder, dirs_exist_ok=True)
            stage.llm.llm_engine.add_lora(LoRARequest("again", 1, folder, load_inplace=True))
        elif turn == 2:
            named = LoRARequest("again", 2, second)
        elif turn == 4:
            stage.llm.reset_prefix_cache()
        outputs = stage.play(prompt, lora_request=named)
        answers += tokens_of(outputs)
        cached += cached_of(outputs)
        stage.push_out(60 + turn)
    return {"tokens": answers, "cached": cached}


def adapter_unloaded(stage: Stage) -> dict[str, Any]:
    """The same with one that was unloaded before its files were written again."""
    return adapter_loaded_again(stage, unloaded=True)


def hidden_states(stage: Stage) -> dict[str, Any]:
    """What vLLM keeps of prompts' hidden states (extract_hidden_states), twice, evicted between.

    ``hidden``: a number for each whole block of each prompt, read when its request has ended.
    """
    manager = stage.core.scheduler.kv_cache_manager
    groups = stage.core.scheduler.kv_cache_config.kv_cache_groups
    (layer,) = (n for g in groups for n in g.layer_names if n.startswith("cache_only_layers"))
    at = next(i for i, group in enumerate(groups) if layer in group.layer_names)
    size, free, found = groups[at].kv_cache_spec.block_size, manager.free, {}

    def read_and_free(request: Any) -> None:
        blocks = manager.get_block_ids(request.request_id)[at][: request.num_prompt_tokens // size]
        key = len(found), tuple(request.prompt_token_ids[:8])
        (found[key],) = stage.core.model_executor.collective_rpc(_hidden, args=(layer, blocks))
        free(request)

    manager.free = read_and_free
    asked, answers, cached = prompts(23, 6, 420), [], []
    for turn in range(2):
        outputs = stage.play(asked)
        answers += tokens_of(outputs)
        cached += cached_of(outputs)
        if turn == 0:
            manager.free = free
            stage.push_out(180)
            manager.free = read_and_free
    manager.free = free
    ended = sorted((number // len(asked), prompt, sums) for (number, prompt), sums in found.items())
    return {"tokens": answers, "cached": cached, "hidden": [sums for _, _, sums in ended]}


def _hidden(worker: Any, layer: str, blocks: list[int]) -> list[float]:
    """Runs on the worker: one number for each block, on which each of the block's has a say."""
    held = worker.model_runner.vllm_config.compilation_config.static_forward_context[layer].kv_cache
    flat = [held[block].double().flatten() for block in blocks]
    return [float((one * one.new_tensor(range(one.numel())).cos()).sum()) for one in flat]


def _held_up(_: Any) -> int:
    """Runs on each worker."""
    import late_copies

    return late_copies.held_up()


def each_engine(stage: Stage) -> dict[str, Any]:
    """Twelve prompts in rotation, three times, each asked of one engine after the other.

    ``loaded``: tokens that the engine with the fewest has found beyond its GPU's cache.
    """
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    ranks, asked = range(stage.llm.num_engines), prompts(19, 12, 420)
    answers = [
        stage.llm.ask(prompt, sampling, rank)
        for _ in range(3)
        for prompt in asked
        for rank in ranks
    ]
    found = {
        metric.labels["engine"]: int(metric.value)
        for metric in stage.llm.get_metrics()
        if metric.name == "vllm:external_prefix_cache_hits"
    }
    return {
        "tokens": answers,
        "loaded": min(found.get(str(rank), 0) for rank in ranks),
        "runner": stage.llm.collective_rpc(runner)[0],
    }


def images(stage: Stage) -> dict[str, Any]:
    """One prompt about one image, another, and under another salt; again when all have left."""
    from images import IMAGE_TOKEN, noise

    prompt = [token for token in prompts(18, 1, 440)[0] if token != IMAGE_TOKEN]
    prompt = [*prompt[:30], IMAGE_TOKEN, *prompt[30:]]
    asked, cached, answers = [(1, "one"), (2, "one"), (1, "two")], [], []
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    for turn in range(2):
        for seed, salt in asked:
            given = {"prompt_token_ids": prompt, "multi_modal_data": {"image": noise(seed)}}
            outputs = stage.llm.generate([{**given, "cache_salt": salt}], sampling, use_tqdm=False)
            cached += cached_of(outputs)
            answers += tokens_of(outputs)
            stage.push_out(180 + turn)
    return {"tokens": answers, "cached": cached, "placeholders": len(outputs[0].prompt_token_ids)}


def experts(stage: Stage) -> dict[str, Any]:
    """Prompts whose KV leaves the GPU, twice: which experts computed each of their tokens."""
    found: dict[str, list[Any]] = {"tokens": [], "cached": [], "experts": []}
    for turn in range(2):
        for prompt in prompts(23, 6, 440):
            outputs = stage.play([prompt], max_tokens=3)
            found["tokens"] += tokens_of(outputs)
            found["cached"] += cached_of(outputs)
            found["experts"].append(outputs[0].outputs[0].routed_experts.tolist())
        stage.push_out(230 + turn)
    return {**found, "loaded": stage.tier_stats()["loaded"]}


def node_lost(stage: Stage) -> dict[str, Any]:
    """End the second node between two requests; what does the next one say, and how late?"""
    stage.play(prompts(10, 1, 300))
    _lose(int(os.environ["TEST_LOSE"]))
    return _end(stage)


def node_lost_at_work(stage: Stage) -> dict[str, Any]:
    """The same while it answers."""
    stage.play(prompts(10, 1, 300))
    node = int(os.environ["TEST_LOSE"])
    losing = threading.Timer(_AT_WORK_S, _lose, (node,))
    losing.start()
    ended = _end(stage, max_tokens=1500)
    losing.join()
    return ended


def _end(stage: Stage, max_tokens: int = 12) -> dict[str, Any]:
    """The error that a request ends in, and what it says; empty if it is answered."""
    began, error, said = time.monotonic(), "", ""
    try:
        stage.play(prompts(10, 1, 300), max_tokens)
    except Exception as raised:  # noqa: BLE001 - the error is the answer
        error, said = type(raised).__name__, str(raised)
    return {"error": error, "said": said, "seconds": round(time.monotonic() - began, 1)}


def _lose(pid: int) -> None:
    """Kill a process, and wait for those that end with it: they could answer until they have."""
    node = psutil.Process(pid)
    ending = [node, *node.children(recursive=True)]
    node.kill()
    until = time.monotonic() + _LOST_S
    while any(_runs(one) for one in ending):
        if time.monotonic() > until:
            raise TimeoutError(f"a process of the lost node still runs after {_LOST_S:g} s")
        time.sleep(0.01)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def both_kinds(stage: Stage) -> dict[str, Any]:
    """A prefix that has left the GPU comes again, twice, with another end each time.

    ``external``: tokens of these that a connector has brought. vLLM tells them by source when it
    answers; its counters of hits lack, up to 0.29, those of a step without an answer.
    """
    prefix = prompts(22, 1, 4 * 128)[0]
    stage.play([prefix + [7]], max_tokens=1)
    tails, answers, cached, loaded = prompts(23, 2, 31), [], [], 0
    external = 0
    for turn, tail in enumerate(tails):
        stage.push_out(220 + turn)
        before = stage.tier_stats()["loaded"], stage.counter(*_BY_CONNECTORS)
        outputs = stage.play([prefix + tail])
        answers += tokens_of(outputs)
        cached += cached_of(outputs)
        loaded += stage.tier_stats()["loaded"] - before[0]
        external += stage.counter(*_BY_CONNECTORS) - before[1]
    return {"tokens": answers, "cached": cached, "blocks_loaded": loaded, "external": external}


def shrunk(stage: Stage, pages: int = 4) -> dict[str, Any]:
    """Eight prompts in rotation, twice, while kvcached gives the GPU so many pages, if it is there.

    ``cached``: tokens of each that were hits. Of kvcached: its pool, pages that have memory at the
    end, and of how many.
    """
    pool = stage.core.scheduler.kv_cache_manager.block_pool
    memory = getattr(pool, "kv_cache_manager", None)
    found: dict[str, Any] = {"pool": type(pool).__name__}
    if memory is not None:
        found["pages_before"] = memory.page_allocator.get_num_inuse_pages()
        memory.resize(pages * memory.page_size)
    asked, answers, cached = prompts(24, 8, 420), [], []
    for _ in range(2):
        for prompt in asked:
            outputs = stage.play([prompt])
            answers += tokens_of(outputs)
            cached += cached_of(outputs)
    if memory is not None:
        allocator = memory.page_allocator
        found["pages"], found["of"] = allocator.get_num_inuse_pages(), memory.mem_size
        found["of"] //= memory.page_size
        found["total"] = allocator.get_num_total_pages()
    return {"tokens": answers, "cached": cached, "tier": stage.tier_stats(), **found}


def prefill_side(stage: Stage) -> dict[str, int]:
    """Counters of the tier where prompts are computed for another engine."""
    found: dict[str, int] = stage.llm.prefill_stats()
    return found
