"""The load: many chats take turns, so that each finds its prefix gone from the GPU cache."""

import time
from dataclasses import dataclass

from openai import OpenAI

from scripts.demo_app.model import passages
from scripts.demo_app.server import MODEL_NAME, DemoError, Server, progress
from scripts.demo_app.settings import Settings

Message = dict[str, str]


@dataclass(frozen=True)
class Run:
    """What one run of the load gave: per request in order, and the server's counters."""

    conversations: int
    first_token_s: list[float]
    answers: list[str]
    prompt_tokens: int
    cached_tokens: int
    loaded_tokens: int

    @property
    def recomputed_tokens(self) -> int:
        """Prompt tokens that were found in no cache."""
        return self.prompt_tokens - self.cached_tokens - self.loaded_tokens

    @property
    def returning_s(self) -> list[float]:
        """The times to first token of the requests after every conversation's first."""
        return self.first_token_s[self.conversations :]


def user_messages(size: Settings) -> list[list[str]]:
    """What the users say, by conversation and turn: a document to read at first, then questions."""
    sizes = [size.document_chars] + [size.question_chars] * (size.turns - 1)
    texts = iter(passages(sizes * size.conversations))
    return [
        [f"{'Continue with' if turn else 'Read'}:\n{next(texts)}" for turn in range(size.turns)]
        for _ in range(size.conversations)
    ]


def ask(client: OpenAI, messages: list[Message], size: Settings) -> tuple[float, str]:
    """One streamed chat completion: its time to first token and its text."""
    began = time.perf_counter()
    stream = client.chat.completions.create(
        model=MODEL_NAME,
        messages=messages,
        max_tokens=size.answer_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    first, text = None, []
    for chunk in stream:
        # vLLM sends its first chunk with the first token, even if that is not a whole character.
        first = first or time.perf_counter() - began
        if chunk.choices and chunk.choices[0].delta.content:
            text.append(chunk.choices[0].delta.content)
    if first is None:
        raise DemoError("the server sent an empty answer")
    return first, "".join(text)


def play(server: Server, size: Settings) -> Run:
    """Play all conversations, one turn of each in rotation, one request at a time.

    One at a time, because the times are then those of the requests and not of the queue, and the
    answers cannot depend on which requests shared a batch.
    """
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)
    texts = user_messages(size)
    chats: list[list[Message]] = [[] for _ in texts]
    total, began = size.conversations * size.turns, time.monotonic()
    samples: list[tuple[float, str]] = []
    ask(client, [{"role": "user", "content": "Hello"}], size)  # What only the first request pays.
    before = server.counters()
    for turn in range(size.turns):
        for chat, said in zip(chats, texts, strict=True):
            chat.append({"role": "user", "content": said[turn]})
            samples.append(ask(client, chat, size))
            chat.append({"role": "assistant", "content": samples[-1][1]})
            progress(f"  {len(samples)} of {total} requests, {time.monotonic() - began:.0f} s")
    progress("")
    print(f"  {total} requests played in {time.monotonic() - began:.0f} s", flush=True)
    after = server.counters()
    counted = {key: round(after[key] - before[key]) for key in after}
    return Run(
        conversations=size.conversations,
        first_token_s=[first for first, _ in samples],
        answers=[text for _, text in samples],
        prompt_tokens=counted["prompt"],
        cached_tokens=counted["cached"],
        loaded_tokens=counted["loaded"],
    )
