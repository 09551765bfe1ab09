"""What one random run asks of a real engine, by its seed alone; imports nothing of vLLM's.

What vLLM itself answers wrongly without a tier, or ends with, is not asked for. Each place that
leaves something out says what: all of it was seen on vLLM 0.32.0 with the CPU's build.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

KINDS = (
    "plain", "plain", "plain", "window", "ngram", "eagle3", "mtp", "lora", "lora", "embeds",
    "images", "states",
)  # fmt: skip
DRAFTS = ("ngram", "eagle3", "mtp")
FOLDER = "FOLDER"  # stands for that of the model that drafts
_REPLACED = {"images": "TEST_IMAGES", "states": "TEST_STATE_KERNELS"}
# What a run may be like besides, and the share of the runs that are.
RUN_SHARES = {
    "asynchronous": 0.6,
    "priorities": 0.35,
    "text": 0.5,  # there is a tokenizer
    "events": 0.2,
    "flipped bits": 0.25,
    "resets": 0.6,  # what runs loses its blocks, also by a pause or sleep
    "throttled": 0.25,
    "aborts within a step": 0.5,
    "wiped": 0.2,
    "long prefills in parts": 0.25,
}
BESIDES = {"whole prefills": 0.15, "small steps": 0.2, "connector": 0.2}  # drawn by themselves
MORE = {"windows": 0.5, "one manager": 0.3, "two ranks": 0.2, "updates": 0.3}  # where they can be
# What requests ask for, as `Request.features` names it.
ASKED = (
    "salt", "adapter", "session", "embeddings", "image", "structured", "stop strings", "samples",
    "min_tokens", "stop tokens", "allowed tokens", "repetition penalty", "logprobs",
    "prompt_logprobs", "not stored",
)  # fmt: skip
# How an engine gets other weights: those of its adapters, or else its own.
UPDATES = (
    "adapters in place", "adapters unloaded", "adapters elsewhere", "weights behind a reset",
    "weights before a reset", "weights without a reset", "weights asleep",
)  # fmt: skip
COUNTED = ("stored", "loaded", "evicted", "dropped", "failed")  # by the tier, of blocks
# What happens in a run, with its tier and to those who ask.
EVENTS = (
    "steps", "turns", "aborted", "aborted within a step", "preempted", "parked", "asked again",
    "reset", "refused reset", "paused", "paused with a reset", "paused with aborts", "slept",
    "slept with aborts", "called workers", "kept for new weights", *UPDATES, *COUNTED, "pause",
    "resume", "empty", "resize", "set",
)  # fmt: skip
_BY_ARGUMENT = {
    "n": "samples", "stop": "stop strings", "stop_token_ids": "stop tokens",
    "allowed_token_ids": "allowed tokens", "repetition_penalty": "repetition penalty",
    "extra_args": "not stored",
}  # fmt: skip
IMAGE_TOKEN, IMAGE_TOKENS = 3, 64  # of `images`
_LATE: tuple[int | str, ...] = (0, 3, 3, 8, "stream")
_STORES = ("eager", "lazy", "auto")
LIKENESSES = (
    *dict.fromkeys(KINDS), *RUN_SHARES, *BESIDES, *MORE,
    *(f"late: {late}" for late in dict.fromkeys(_LATE)), *(f"stores: {store}" for store in _STORES),
)  # fmt: skip
_REGEX = ("(t[0-9]+){3,9}", "t1(t2|t3)t[4-9]{1,3}(t[0-9]{2}){2,60}")
_BLOCK, _LONGEST = 32, 420
NO_END = "these do not come to an end"  # how a run says that of requests
_BLOCK_OF_STATES, _LONGEST_OF_STATES = 128, 1600
_BLOCK_BYTES = 4 * 2 * 4 * 32 * 4 * _BLOCK  # layers, K and V, heads, their width, float32
_DRAFTS_BYTES = 2.5  # of these: twice the heads, and a draft model's layer


@dataclass(frozen=True)
class Request:
    """One request, or one session with several turns, each its tokens and how many it is answered.

    Attributes:
        sampling: arguments of `vllm.SamplingParams`.
        images: seeds of the images that `IMAGE_TOKEN` stands for.
    """

    prompt: list[int]
    sampling: dict[str, Any]
    priority: int = 0
    salt: str = ""
    lora: int = 0
    regex: str = ""
    embeds: bool = False
    images: tuple[int, ...] = ()
    turns: tuple[tuple[list[int], int], ...] = ()

    def features(self) -> set[str]:
        """Names of `ASKED`."""
        whole = {
            "salt": self.salt, "adapter": self.lora, "session": self.turns, "image": self.images,
            "embeddings": self.embeds, "structured": self.regex,
        }  # fmt: skip
        named = {_BY_ARGUMENT.get(name, name) for name in self.sampling} & set(ASKED)
        return named | {name for name, has in whole.items() if has}


@dataclass(frozen=True)
class Plan:
    """One run.

    Attributes:
        has: names of `RUN_SHARES` and `BESIDES`.
        engine: arguments of `vllm.LLM`, but those that name a folder of a model.
        tier: KVOFFLOAD_* variables.
        late: how late copies happen, see `late_copies`.
        env: of the engine's process, for what tests replace there.
    """

    seed: int
    kind: str
    has: frozenset[str]
    engine: dict[str, Any]
    tier: dict[str, str]
    late: int | str
    env: dict[str, str]
    requests: list[Request]

    def likeness(self) -> list[str]:
        """What this run is like, in names of `LIKENESSES`."""
        named = [self.kind, *sorted(self.has), f"late: {self.late}"]
        return [*named, f"stores: {self.tier['KVOFFLOAD_STORE']}"]


def plan(seed: int) -> Plan:
    """The run of a seed."""
    rng, besides = random.Random(f"engine {seed}"), random.Random(f"besides {seed}")
    kind = rng.choice(KINDS)
    has = _of_the_run(rng, besides, kind)
    has |= _more(random.Random(f"more {seed}"), kind, has)
    late = rng.choice(_LATE)
    if kind == "states" and late == "stream":
        late = 3  # answers differed with the stream of the tests, and in no other way
    env = {"TEST_SLEEP": "1"} | ({"TEST_FORK_WORKERS": "1"} if "two ranks" in has else {})
    if "flipped bits" in has:
        env["TEST_FLIP_STORES"] = rng.choice(["2", "5"])
    if kind in _REPLACED:
        env[_REPLACED[kind]] = "1"
    engine, tier = _engine(rng, kind, has), _tier(rng, kind, has)
    engine |= _steps(besides, has) | _connector(besides, has) | _shape(has)
    tier = _less_usual(besides, tier["KVOFFLOAD_LOAD_MODE"]) | tier
    return Plan(seed, kind, has, engine, tier, late, env, _Asker(seed, kind, has).requests())


def _of_the_run(rng: random.Random, besides: random.Random, kind: str) -> frozenset[str]:
    has = {name for name, share in RUN_SHARES.items() if rng.random() < share}
    has |= {name for name, share in BESIDES.items() if besides.random() < share}
    if kind == "ngram":  # vLLM has no asynchronous scheduling with it
        has.discard("asynchronous")
    if kind == "embeds":  # with it an engine that is given embeddings ends
        has.discard("asynchronous")
        has.discard("text")
    if kind == "states":  # its steps take whole blocks, and such parts are less than one
        has -= {"long prefills in parts", "small steps", "whole prefills"}
    if kind == "images":  # its processor has a tokenizer, and a step takes a whole image
        has.add("text")
        has.discard("small steps")
    if kind != "plain":  # the tests' own knows tokens alone, of one KV cache group
        has.discard("connector")
    if "whole prefills" in has:
        has -= {"long prefills in parts", "small steps"}
    return frozenset(has)


def _more(rng: random.Random, kind: str, has: frozenset[str]) -> set[str]:
    """Names of `MORE`."""
    more = {name for name, share in MORE.items() if rng.random() < share}
    if kind not in ("ngram", "eagle3", "images", "lora", "embeds"):
        more.discard("windows")
    if kind != "window" and "windows" not in more:
        more.discard("one manager")
    if "connector" in has:  # the tests' own is of one process, and keeps what it has
        more -= {"two ranks", "updates"}
    return more


def _shape(has: frozenset[str]) -> dict[str, Any]:
    """Of the cache and its ranks."""
    shape: dict[str, Any] = {"num_gpu_blocks_override": 52} if "windows" in has else {}
    shape |= {"disable_hybrid_kv_cache_manager": True} if "one manager" in has else {}
    return shape | ({"tensor_parallel_size": 2} if "two ranks" in has else {})


def _engine(rng: random.Random, kind: str, has: frozenset[str]) -> dict[str, Any]:
    engine: dict[str, Any] = {
        "block_size": _BLOCK,
        "max_model_len": _LONGEST,
        "num_gpu_blocks_override": rng.choice([15, 16, 20, 26]),
        "max_num_seqs": rng.choice([2, 4, 8]),
        "max_num_batched_tokens": rng.choice([64, 128, 256, 512]),
        "async_scheduling": "asynchronous" in has,
        "skip_tokenizer_init": "text" not in has,
    }
    if "priorities" in has:
        engine["scheduling_policy"] = "priority"
    if "long prefills in parts" in has:
        engine["long_prefill_token_threshold"] = rng.choice([20, 48, 100])
    if "events" in has:
        engine["kv_events_config"] = '{"enable_kv_cache_events": true, "publisher": "null"}'
    if kind == "window":
        engine["num_gpu_blocks_override"] = rng.choice([40, 52])
    elif kind == "images":
        engine["max_num_batched_tokens"] = rng.choice([128, 256, 512])  # a whole image
    elif kind == "embeds":
        engine["enable_prompt_embeds"] = True
    elif kind == "lora":
        # One at a time: vLLM on the CPU answers a batch of several adapters otherwise than each.
        engine.update(enable_lora=True, max_loras=2, max_lora_rank=8, max_num_seqs=1)
    elif kind == "states":
        engine.update(max_model_len=_LONGEST_OF_STATES + 80, enable_prefix_caching=True)
        engine.update(num_gpu_blocks_override=rng.choice([48, 60]))
        engine.update(max_num_batched_tokens=rng.choice([256, 512, 1024]))
        del engine["block_size"]  # vLLM finds one that a state fits in
    elif kind in DRAFTS:
        engine["num_gpu_blocks_override"] += 6
        engine["speculative_config"] = json.dumps(_drafting(rng, kind))
    return engine


def _drafting(rng: random.Random, kind: str) -> dict[str, Any]:
    drafts = {"method": kind, "num_speculative_tokens": 1 if kind == "mtp" else rng.choice([1, 3])}
    if kind == "eagle3":
        drafts["model"] = FOLDER
    if kind == "ngram":
        drafts.update(prompt_lookup_max=3, prompt_lookup_min=1)
    return drafts


def _steps(rng: random.Random, has: frozenset[str]) -> dict[str, Any]:
    """What takes part in a step, besides or instead."""
    if "small steps" in has:  # mostly less than a block
        return {"max_num_batched_tokens": rng.choice([9, 16, 31, 33, 40])}
    if "whole prefills" in has:
        return {"enable_chunked_prefill": False, "max_num_batched_tokens": 512}
    return {}


def _connector(rng: random.Random, has: frozenset[str]) -> dict[str, Any]:
    """One whose loads do not fail, within the step or beside it."""
    more = {"use_async": rng.random() < 0.6, "at_once": rng.random() < 0.5}
    config = {
        "kv_connector": "FlakyConnector", "kv_connector_module_path": "flaky_connector",
        "kv_role": "kv_both", "kv_connector_extra_config": more,
    }  # fmt: skip
    return {"kv_transfer_config": json.dumps(config)} if "connector" in has else {}


def _tier(rng: random.Random, kind: str, has: frozenset[str]) -> dict[str, str]:
    slots = rng.choice([3, 8, 20, 60, 60, 300, 300])
    size = (slots + 0.5) * _BLOCK_BYTES * (_DRAFTS_BYTES if kind in DRAFTS else 1) / 2**30
    modes = ["parked", "auto"] if "flipped bits" in has else ["inline", "parked", "auto", "parked"]
    tier = {
        "KVOFFLOAD_CPU_GIB": repr(rng.choice([0.01, 0.05, 0.3]) if kind == "states" else size),
        "KVOFFLOAD_STORE": rng.choice(_STORES),
        "KVOFFLOAD_LOAD_MODE": rng.choice(modes),
        "KVOFFLOAD_EVICTION": rng.choice(["lru", "adaptive", "arc", "s3fifo"]),
        "KVOFFLOAD_GPU_PREFIXES": "auto",
    }
    if rng.random() < 0.1:
        tier["KVOFFLOAD_STORE_MIN_USES"] = "2"
    if "wiped" in has:
        tier["KVOFFLOAD_WIPE"] = "1"
    if "flipped bits" in has:  # which nothing else would find
        tier["KVOFFLOAD_INTEGRITY"] = "full"
    return tier


def _less_usual(rng: random.Random, mode: str) -> dict[str, str]:
    """Settings of the tier that few ask for; full checks leave no load within a step."""
    checked = "off" if mode == "inline" else "full"
    settings = {"STORE_DECODE": "0", "MAX_STALL_MS": "0", "INTEGRITY": checked}
    return {f"KVOFFLOAD_{name}": value for name, value in settings.items() if rng.random() < 0.25}


class _Asker:
    """Draws the requests of one run, most of which begin like another one."""

    def __init__(self, seed: int, kind: str, has: frozenset[str]) -> None:
        self._rng = random.Random(f"requests {seed}")
        self._kind, self._has = kind, has
        self._block, self._longest, self._count = _BLOCK, _LONGEST, 36
        if kind == "states":
            self._block, self._longest, self._count = _BLOCK_OF_STATES, _LONGEST_OF_STATES, 22

    def requests(self) -> list[Request]:
        """All of them."""
        rng, block = self._rng, self._block
        lengths = [1, block - 1, block, block + 1, 2 * block, 3 * block, 3 * block + 7]
        lengths += [5 * block, 6 * block, 6 * block, 7 * block + 3]
        beginnings = [self._tokens(rng.choice(lengths)) for _ in range(5)]
        counts = rng.choice([[1, 2, 5, 20], [20, 40, 70]])
        return [
            self._request(self._prompt(rng.choice(beginnings)), rng.choice(counts))
            for _ in range(self._count)
        ]

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(4, 1000) for _ in range(count)]

    def _prompt(self, begins: list[int]) -> list[int]:
        rng, block, share = self._rng, self._block, self._rng.random()
        prompt = list(begins)
        if share < 0.2:  # whole blocks, known in full
            prompt = prompt[: len(prompt) // block * block]
        elif share < 0.85:
            prompt += self._tokens(rng.choice([0, 1, 5, block - 1, block, block + 1, 60]))
        else:
            prompt += self._tokens(rng.choice([200, self._longest - 1 - len(prompt)]))
        if self._kind in DRAFTS and rng.random() < 0.5:
            ring = 4 + 6 * rng.randrange(100)  # of `drafts`, to be looked up
            prompt += [ring + at % 6 for at in range(12)]
        return prompt[: self._longest - 1] or [5]

    def _request(self, prompt: list[int], count: int) -> Request:
        rng, kind = self._rng, self._kind
        priority = rng.randrange(3)
        salt = rng.choice(["a", "b"]) if rng.random() < 0.25 else ""
        lora = rng.randrange(3) if kind == "lora" else 0
        # vLLM answers sessions wrongly with asynchronous scheduling and with drafts; the tests'
        # connector takes a prompt to be known when its request comes. Updates would be within one.
        unfit = {"asynchronous", "connector", "updates"} & self._has
        sessions = not unfit and kind not in (*DRAFTS, "embeds")
        if sessions and rng.random() < 0.15:
            return self._session(prompt, priority, lora)
        images: tuple[int, ...] = ()
        if kind == "images" and rng.random() < 0.7:
            images = (rng.choice([1, 1, 2]),) * rng.choice([1, 1, 2])
            prompt = self._with_images(prompt, len(images), count)
        embeds = kind == "embeds" and rng.random() < 0.5
        taken = len(prompt) + len(images) * (IMAGE_TOKENS - 1)
        sampling, regex = self._sampling(min(count, self._longest - taken), embeds)
        return Request(prompt, sampling, priority, salt, lora, regex, embeds, images)

    def _session(self, prompt: list[int], priority: int, lora: int) -> Request:
        rng, turns, total = self._rng, list[tuple[list[int], int]](), 0
        for turn in range(rng.choice([2, 3, 4])):
            tokens = self._tokens(rng.choice([1, 5, self._block, 40])) if turn else prompt[:200]
            count = rng.choice([1, 3, 20])
            total += len(tokens) + count
            if total <= self._longest - 5:
                turns.append((tokens, count))
        sampling = {"temperature": 0, "ignore_eos": True, "detokenize": False}
        return Request(turns[0][0], sampling, priority, lora=lora, turns=tuple(turns))

    def _with_images(self, prompt: list[int], images: int, count: int) -> list[int]:
        """The prompt with their tokens in it; two may stand beside each other or apart."""
        at = self._rng.choice([0, 1, 31, 32, 33, 64])
        apart = self._rng.choice([0, 20])
        prompt = prompt[: self._longest - count - images * IMAGE_TOKENS - 2]
        for image in range(images):
            prompt.insert(at + image * (apart + 1), IMAGE_TOKEN)
        return prompt

    def _sampling(self, count: int, embeds: bool) -> tuple[dict[str, Any], str]:
        """Greedy in any case, so that the answer is known; and an expression that it matches."""
        rng, drafts = self._rng, self._kind in DRAFTS
        asked: dict[str, Any] = {"max_tokens": count, "temperature": 0, "ignore_eos": True}
        asked["detokenize"], regex = False, ""
        share = rng.random()
        if "text" in self._has and share < 0.4:
            asked["detokenize"] = True
            # vLLM answers a structured output wrongly with drafts.
            if share < 0.2 and not drafts:
                regex, asked["ignore_eos"] = rng.choice(_REGEX), False
            else:
                asked["stop"] = [f"t{rng.randrange(10)}", f"{rng.randrange(10, 99)}"]
        elif share > 0.85 and not drafts:
            # Several answers are samples, here of the likeliest token alone. With drafts, which are
            # accepted by chance then, nobody has compared them.
            asked.update(temperature=1.0, top_k=1, n=rng.choice([2, 3]))
        if not regex:
            self._limit(asked, count, embeds)
        if rng.random() < 0.15:
            asked["logprobs"] = 2
        # vLLM forgets a part of them when a request loses its blocks by a reset, and on the CPU its
        # engine ends with them and an adapter. Embeddings have no tokens that could be likely.
        forgets = "resets" in self._has or self._kind == "lora"
        if rng.random() < 0.3 and not forgets and not embeds:
            asked["prompt_logprobs"] = 2
        if rng.random() < 0.1:
            asked["extra_args"] = {"kvoffload_store": 0}
        return asked, regex

    def _limit(self, asked: dict[str, Any], count: int, embeds: bool) -> None:
        """Perhaps when it ends, and which tokens there may be."""
        rng = self._rng
        if rng.random() < 0.15:
            asked["stop_token_ids"] = self._tokens(200)
            if self._kind not in DRAFTS and "asynchronous" not in self._has:  # docs/limits.md
                asked["min_tokens"] = min(count, 4)
        if rng.random() < 0.1 and not embeds:
            asked["repetition_penalty"] = 1.3
        if rng.random() < 0.1:
            asked["allowed_token_ids"] = sorted(set(self._tokens(300)))
