"""`pressure`: chats whose KV is three times the GPU's cache, all at once.

More chats are admitted than the cache has room for once their answers grow, so vLLM preempts. A
chat's next turn is asked for when its answer is there: its history has left the GPU by then. What
is counted is what vLLM's scheduler had computed, over the least that a cache without end would
have, and how long each request was without a token.

The engine must run in this process (`IN_PROCESS`), because its scheduler is read.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from scripts.bench.common import quantile
from scripts.bench.serve.load import ask, random_prompts

if TYPE_CHECKING:
    from scripts.bench.serve.load import Bench, Prompt

# vLLM's variable, for the environment of a process that plays this.
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# On a GPU, so that answers do not depend on who else is in their batches.
AS_IF_ALONE = {"VLLM_BATCH_INVARIANT": "1"}
WARM_TOKENS = (300, 1500)  # of two prompts that do not count: first kernels are slow


@dataclass(frozen=True)
class Crowd:
    """Chats that begin together.

    Attributes:
        history: tokens of a chat's first prompt.
        new: tokens that each later turn adds to what was said.
        answers: tokens of an answer, from and to.
    """

    chats: int
    history: int
    new: int
    answers: tuple[int, int]
    turns: int
    vocabulary: int


@dataclass
class Chat:
    """A conversation: what was said, and of the turn under way when its tokens came.

    Attributes:
        at, steps: when this turn was asked for and its tokens came, in seconds and in steps.
    """

    number: int
    said: Prompt
    lengths: list[int]
    turn: int = 0
    at: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    answers: list[Prompt] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Of the request of this turn."""
        return f"{self.number}-{self.turn}"


def crowd_of(bench: Bench, small_model: bool) -> Crowd:
    """The chats that the sizes ask for; the check of answers has fewer and shorter ones."""
    size = bench.sizes
    if small_model:
        return Crowd(
            size.pressure_tokens_chats, size.pressure_tokens_history, size.pressure_new,
            (size.pressure_tokens_answer_min, size.pressure_tokens_answer_max),
            size.pressure_turns, size.tokens_vocabulary,
        )  # fmt: skip
    return Crowd(
        size.pressure_chats, size.pressure_history, size.pressure_new,
        (size.pressure_answer_min, size.pressure_answer_max), size.pressure_turns, size.vocabulary,
    )  # fmt: skip


def chats_of(crowd: Crowd) -> list[Chat]:
    """The same for every mode."""
    source = random.Random("pressure")
    texts = random_prompts("pressure", crowd.chats, crowd.history, crowd.vocabulary)
    return [
        Chat(i, text, [source.randint(*crowd.answers) for _ in range(crowd.turns)])
        for i, text in enumerate(texts)
    ]


class Player:
    """Plays a crowd on an engine in this process.

    Args:
        at_once: chats that are under way at the same time; the next begins when one has ended.
    """

    def __init__(self, bench: Bench, crowd: Crowd, at_once: int) -> None:
        self._engine = bench.llm.llm_engine
        self._crowd = crowd
        self._waiting = chats_of(crowd)[::-1]
        self._at_once = at_once
        self._under_way: dict[str, Chat] = {}
        self.chats: list[Chat] = self._waiting[::-1]
        self.first: list[float] = []  # seconds to the first token, of each request
        self.longest: list[float] = []  # seconds, the longest without a token, of each request
        self.longest_steps: list[int] = []  # the same in steps of the engine
        self._steps = 0

    def play(self) -> float:
        """All turns of all chats; returns seconds."""
        began = time.perf_counter()
        while self._waiting or self._under_way:
            while self._waiting and len(self._under_way) < self._at_once:
                self._ask(self._waiting.pop())
            outputs = self._engine.step()
            self._steps += 1
            now = time.perf_counter()
            for output in outputs:
                self._take(output, now)
        return time.perf_counter() - began

    def _ask(self, chat: Chat) -> None:
        chat.at, chat.steps = [time.perf_counter()], [self._steps]
        chat.answers.append([])
        self._under_way[chat.name] = chat
        ask(self._engine, chat.name, chat.said, chat.lengths[chat.turn])

    def _take(self, output: Any, now: float) -> None:
        chat = self._under_way[output.request_id]
        tokens = list(output.outputs[0].token_ids)
        if tokens:
            chat.answers[-1] += tokens
            chat.at.append(now)
            chat.steps.append(self._steps)
        if output.finished:
            del self._under_way[output.request_id]
            self._ended(chat)

    def _ended(self, chat: Chat) -> None:
        self.first.append(chat.at[1] - chat.at[0])
        self.longest.append(max(b - a for a, b in zip(chat.at, chat.at[1:])))
        self.longest_steps.append(max(b - a for a, b in zip(chat.steps, chat.steps[1:])))
        chat.said = chat.said + chat.answers[-1]
        chat.turn += 1
        if chat.turn < self._crowd.turns:
            seed = f"pressure-{chat.number}-{chat.turn}"
            chat.said += random_prompts(seed, 1, self._crowd.new, self._crowd.vocabulary)[0]
            self._ask(chat)


def least(chats: list[Chat]) -> int:
    """Tokens that have to be computed in any case: each once, and an answer's last one not."""
    return sum(len(chat.said) - 1 for chat in chats)


def play(bench: Bench, crowd: Crowd) -> dict[str, Any]:
    """One run of the crowd, in figures."""
    scheduler = bench.llm.llm_engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    for number, tokens in enumerate(WARM_TOKENS):
        length = min(tokens, crowd.history)
        bench.generate(random_prompts(f"warm-{number}", 1, length, crowd.vocabulary), 8)
    player = Player(bench, crowd, crowd.chats)
    before = preemptions(bench.llm)
    with scheduled(scheduler) as steps:
        seconds = player.play()
    needed, cache = least(player.chats), bench.sizes.block_size * (pool.num_gpu_blocks - 1)
    found = {
        "seconds": seconds,
        "requests": len(player.first),
        "times_the_cache": needed / cache,
        "computed": sum(steps),
        "recomputed": sum(steps) - needed,
        "preemptions": preemptions(bench.llm) - before,
        "first_p50": quantile(player.first, 0.5),
        "first_max": max(player.first),
        "longest_wait": max(player.longest),
        "longest_wait_steps": max(player.longest_steps),
        "steps": len(steps),
        "answers": [chat.answers for chat in player.chats],
    }
    bench.say(words(found))
    return found


def words(found: dict[str, Any]) -> str:
    """One line of progress."""
    return (
        f"pressure: {found['requests']} requests in {found['seconds']:.1f} s,"
        f" {found['times_the_cache']:.2f} times the GPU's cache,"
        f" {found['recomputed']:,} tokens recomputed, {found['preemptions']} preemptions,"
        f" first token p50 {found['first_p50']:.2f} s,"
        f" longest wait for a token {found['longest_wait']:.2f} s,"
        f" {found['longest_wait_steps']} of {found['steps']} steps"
    )


def pressure(bench: Bench) -> dict[str, Any]:
    """On the model that is benchmarked. Its answers show nothing where weights are random."""
    found = play(bench, crowd_of(bench, small_model=False))
    return {key: value for key, value in found.items() if key != "answers"}


def pressure_tokens(bench: Bench) -> dict[str, Any]:
    """On the small model whose answers depend on all of the prompt.

    Plain vLLM also answers one chat at a time: those are the answers that the others should be
    equal to. Its own under pressure say what batches alone make of them, which is nothing where
    vLLM computes each request as if it were alone (`AS_IF_ALONE`).
    Answers are given as digests, which is enough to compare them.
    """
    crowd = crowd_of(bench, small_model=True)
    found = play(bench, crowd)
    found["answers"] = [[digest(answer) for answer in chat] for chat in found["answers"]]
    if bench.plain:
        bench.llm.reset_prefix_cache()
        alone = Player(bench, crowd, 1)
        seconds = alone.play()
        found["alone"] = [[digest(answer) for answer in chat.answers] for chat in alone.chats]
        bench.say(f"the same one at a time: {seconds:.1f} s")
    return found


def digest(answer: Prompt) -> str:
    """Short, and another one for other tokens."""
    return hashlib.sha256(json.dumps(answer).encode()).hexdigest()[:16]


def preemptions(llm: Any) -> int:
    """As vLLM counts them, since its start."""
    return sum(int(m.value) for m in llm.get_metrics() if m.name == "vllm:num_preemptions")


@contextmanager
def scheduled(scheduler: Any) -> Iterator[list[int]]:
    """The tokens of each step that is scheduled meanwhile, by whatever is called now."""
    schedule, tokens = scheduler.schedule, list[int]()
    own = "schedule" in vars(scheduler)

    def counted(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        tokens.append(output.total_num_scheduled_tokens)
        return output

    scheduler.schedule = counted
    try:
        yield tokens
    finally:
        if own:
            scheduler.schedule = schedule
        else:
            del scheduler.schedule
