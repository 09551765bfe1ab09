"""The scenarios S1, S2, S3 and the checks: what is asked of an engine, and what is measured.

Prompts are random token ids, answers greedy with a fixed length. A time is the wall time of one
whole call of `LLM.generate`. S4 is in `arrivals`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from scripts.bench.serve.sizes import Sizes

Prompt = list[int]


class Bench:
    """An engine and what has been asked of it so far.

    Args:
        llm: a `vllm.LLM`.
        sizes: the load.
        say: takes one line of progress.
        floor: S4 also measures arrivals that are still in the GPU cache.
        plain: the engine is vLLM without any tier.
    """

    def __init__(
        self,
        llm: Any,
        sizes: Sizes,
        say: Callable[[str], None],
        floor: bool = False,
        plain: bool = False,
    ) -> None:
        self.llm = llm
        self.sizes = sizes
        self.say = say
        self.floor = floor
        self.plain = plain
        self.phases = 0  # of S4, so far
        self.sessions: list[Prompt] = []
        self._taken = 0  # sessions of S3 that S1 has asked for

    def generate(self, prompts: list[Prompt], max_tokens: int) -> tuple[float, list[Any]]:
        """Seconds of one call, and its outputs."""
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        began = time.perf_counter()
        outputs = self.llm.generate(asked, sampling(max_tokens), use_tqdm=False)
        return time.perf_counter() - began, outputs

    def least_recent(self, count: int) -> list[Prompt]:
        """Sessions of S3, first those that left the GPU first; none twice in a round of them."""
        first, self._taken = self._taken, self._taken + count
        return [self.sessions[i % len(self.sessions)] for i in range(first, self._taken)]


def sampling(max_tokens: int, **more: Any) -> Any:
    """Greedy, of a fixed length, as token ids."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **more
    )


def ask(engine: Any, name: str, prompt: Prompt, max_tokens: int) -> None:
    """Add a request to an `LLMEngine` that is stepped; its outputs have the new tokens alone."""
    from vllm.sampling_params import RequestOutputKind

    parameters = sampling(max_tokens, output_kind=RequestOutputKind.DELTA)
    engine.add_request(name, {"type": "token", "prompt_token_ids": prompt}, parameters)


def random_prompts(seed: str, count: int, tokens: int, vocabulary: int) -> list[Prompt]:
    """Prompts that share no block with those of another seed."""
    source = random.Random(seed)
    return [[source.randrange(5, vocabulary) for _ in range(tokens)] for _ in range(count)]


def prompts(bench: Bench, seed: str, count: int, tokens: int) -> list[Prompt]:
    """The same, from the vocabulary of the engine's model."""
    return random_prompts(seed, count, tokens, bench.sizes.vocabulary)


def cached(outputs: list[Any]) -> int:
    """Prompt tokens found in any cache."""
    return sum(output.num_cached_tokens or 0 for output in outputs)


def tokens_of(outputs: list[Any]) -> list[Prompt]:
    """The answers."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def s3(bench: Bench) -> dict[str, Any]:
    """Turns of all sessions at once; more sessions than the GPU cache holds."""
    size = bench.sizes
    bench.sessions = prompts(bench, "s3", size.s3_sessions, size.s3_tokens)
    texts: list[Prompt] = [list(p) for p in bench.sessions]
    turns = []
    for turn in range(size.s3_turns):
        seconds, outputs = bench.generate(texts, size.s3_answer)
        share = cached(outputs) / sum(map(len, texts))
        turns.append({"seconds": seconds, "cached": share})
        bench.say(f"S3 turn {turn + 1}: {seconds:.3f} s, {share:.1%} of the prompts cached")
        more = prompts(bench, f"s3-{turn}", size.s3_sessions, size.s3_extend)
        texts = [a + b + c for a, b, c in zip(texts, tokens_of(outputs), more)]
    return {
        "cold": turns[0]["seconds"],
        "samples": [turn["seconds"] for turn in turns[1:]],
        "cached": [turn["cached"] for turn in turns[1:]],
    }


def s1(bench: Bench) -> dict[str, Any]:
    """One request at a time for a prompt of S3 that has left the GPU; one token each.

    And the same again, which the GPU has then: what no tier can be below.
    """
    if not bench.sessions:
        s3(bench)
    texts = bench.least_recent(bench.sizes.s1_requests)
    found = _one_by_one(bench, "S1", texts, 1)
    return {**found, "again": _one_by_one(bench, "S1, from the GPU", texts, 1)}


def s1long(bench: Bench) -> dict[str, Any]:
    """Long prompts in rotation, so that each has left the GPU when it comes again."""
    size = bench.sizes
    texts = prompts(bench, "s1long", size.s1long_requests, size.s1long_tokens)
    cold = _one_by_one(bench, "S1 long, cold", texts, 2)
    found = _one_by_one(bench, "S1 long", texts * size.s1long_rounds, 2)
    return {**found, "cold": cold["samples"]}


def one(bench: Bench) -> dict[str, Any]:
    """Whether prompts answered with one token are stored and found again."""
    size = bench.sizes
    texts = prompts(bench, "one", size.s1long_requests, size.s1long_tokens)
    _one_by_one(bench, "one-token requests, cold", texts, 1)
    asked = texts * size.s1long_rounds
    again = _one_by_one(bench, "one-token requests, again", asked, 1)
    return {**again, "hits": sum(share > 0.5 for share in again["cached"]), "asked": len(asked)}


def s2(bench: Bench) -> dict[str, Any]:
    """Fresh prompts at once: nothing to find, only the cost of storing."""
    size, samples = bench.sizes, []
    for repeat in range(size.s2_repeats):
        texts = prompts(bench, f"s2-{repeat}", size.s2_requests, size.s2_tokens)
        seconds, outputs = bench.generate(texts, size.s2_answer)
        samples.append(seconds)
        bench.say(f"S2 repeat {repeat + 1}: {seconds:.3f} s, {cached(outputs)} tokens cached")
    return {"samples": samples}


def tokens(bench: Bench) -> dict[str, Any]:
    """Greedy answers of single requests whose prefixes come and go.

    Whether they are equal is for the parent, which has the answers of a plain engine that keeps
    every prefix on the GPU. The engine's model must depend on the whole prompt: with vLLM's dummy
    weights a token depends on the one before it alone.
    """
    size, answers, found = bench.sizes, [], 0
    known = size.tokens_vocabulary
    texts = random_prompts("tokens", size.tokens_prompts, size.tokens_tokens, known)
    for turn in range(4):
        more = random_prompts(f"tokens-{turn}", len(texts), 40, known)
        for i, text in enumerate(texts):
            _, outputs = bench.generate([text], size.tokens_answer)
            answers += tokens_of(outputs)
            found += cached(outputs)
            if turn < 2:  # the last two ask for the same, which ends with a block
                texts[i] = text + answers[-1] + more[i]
    bench.say(f"answers: {len(answers)} requests, {found} tokens cached")
    return {"answers": answers, "cached": found}


def _one_by_one(bench: Bench, name: str, texts: list[Prompt], max_tokens: int) -> dict[str, Any]:
    samples, shares = [], []
    for text in texts:
        seconds, outputs = bench.generate([text], max_tokens)
        samples.append(seconds)
        shares.append(cached(outputs) / len(text))
    times = " ".join(f"{1000 * s:.1f}" for s in samples)
    bench.say(f"{name}: {times} ms, cached {' '.join(f'{share:.0%}' for share in shares)}")
    return {"samples": samples, "cached": shares}


def play(bench: Bench, name: str) -> dict[str, Any]:
    """Play a scenario by name."""
    from scripts.bench.serve import arrivals, pressure

    scenarios = {
        "s1": s1, "s2": s2, "s3": s3, "s1long": s1long, "one": one, "tokens": tokens,
        "s4": arrivals.s4, "s4graphs": arrivals.s4,
        "pressure": pressure.pressure, "pressure_tokens": pressure.pressure_tokens,
    }  # fmt: skip
    return scenarios[name](bench)
