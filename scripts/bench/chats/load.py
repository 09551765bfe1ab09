"""What `bench chats` asks of a server: seeded conversations, and prompts for one at a time.

The same seed makes the same load for every mode. Lengths are drawn evenly between their bounds, so
that few prompts end on a block. Tokens are random: two chats share no block.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

Tokens = list[int]

FIRST_TOKEN = 5  # those before it have a meaning in many vocabularies


@dataclass(frozen=True)
class Load:
    """Requests, tokens and blocks; the defaults are for an 8B model on one GPU.

    Attributes:
        chats: conversations, which the GPU cache of `gpu_blocks` cannot hold together.
        at_once: clients; each sends its next request when its last is answered.
        turns: requests of a chat, the first with the history alone.
        stagger_s: the clients begin so far apart, as people do.
        gpu_blocks: GPU cache of all modes but the floor, in vLLM's own block size.
        floor_gpu_blocks: of the floor, which must hold everything; 0 leaves it to vLLM.
        cpu_gib: CPU memory of this tier and of SimpleCPUOffloadConnector.
        offloading_gib: of OffloadingConnector and LMCache, which pin more than asked.
        singles: prompts of each kind for one at a time; all together must not fit into `gpu_blocks`
            by one prompt or more, so that each has left the GPU when it comes again.
        singles_rounds: how often each is asked for again.
        pause_s: between two of them, so that what the first stored is done.
        settle_s: from a server's start to its first request; some tiers still grow then.
    """

    seed: str = "chats"
    vocabulary: int = 128_000
    max_model_len: int = 0
    gpu_blocks: int = 12_000
    floor_gpu_blocks: int = 0
    cpu_gib: float = 72.0
    offloading_gib: float = 64.0
    chats: int = 72
    at_once: int = 12
    turns: int = 4
    history_min: int = 4000
    history_max: int = 7000
    new_min: int = 60
    new_max: int = 180
    answer_min: int = 32
    answer_max: int = 96
    stagger_s: float = 0.05
    singles: int = 7
    singles_rounds: int = 2
    whole_tokens: int = 8192
    ragged_tokens: int = 8187
    stored_tokens: int = 8092
    extend_tokens: int = 200
    decoded_tokens: int = 16
    pause_s: float = 0.05
    settle_s: float = 0.0


# For a tiny model on a CPU, whose blocks have 128 tokens; the numbers mean nothing.
SMALL = Load(
    vocabulary=1000,
    max_model_len=2048,
    gpu_blocks=40,
    cpu_gib=0.25,
    offloading_gib=0.25,
    chats=20,
    at_once=4,
    turns=3,
    history_min=400,
    history_max=700,
    new_min=10,
    new_max=40,
    answer_min=6,
    answer_max=12,
    singles=3,
    singles_rounds=1,
    whole_tokens=1024,
    ragged_tokens=1019,
    stored_tokens=1000,
    extend_tokens=100,
)


@dataclass
class Turn:
    """What is new in a turn, and how many tokens are answered."""

    new: Tokens
    answer: int


@dataclass
class Chat:
    """A conversation: all that was said so far, and the turns that are still to come."""

    name: str
    said: Tokens
    turns: list[Turn]
    asked: int = 0

    def ask(self) -> tuple[str, Tokens, int]:
        """Name, prompt and length of the answer of the next request."""
        turn = self.turns[self.asked]
        self.asked += 1
        self.said = [*self.said, *turn.new]
        return f"{self.name}-turn-{self.asked}", self.said, turn.answer

    def answered(self, tokens: Tokens) -> None:
        """The history grows by the model's own answer."""
        self.said = [*self.said, *tokens]

    @property
    def left(self) -> int:
        """Turns that are still to come."""
        return len(self.turns) - self.asked


@dataclass
class Single:
    """A prompt for one at a time: its first part is stored, then the whole is asked for.

    Attributes:
        kind: whole, ragged, extended or decoded.
        extensions: new tokens of each round, which may be none.
        answer: tokens.
    """

    kind: str
    name: str
    stored: Tokens
    extensions: list[Tokens] = field(default_factory=list)
    answer: int = 1


def tokens(seed: str, count: int, vocabulary: int) -> Tokens:
    """Random tokens; another seed, other tokens."""
    source = random.Random(seed)
    return [source.randrange(FIRST_TOKEN, vocabulary) for _ in range(count)]


def chats(load: Load) -> list[Chat]:
    """All conversations, with the lengths of all their turns."""
    source, made = random.Random(f"{load.seed}-lengths"), []
    for number in range(load.chats):
        name = f"chat-{number}"
        history = source.randint(load.history_min, load.history_max)
        turns = []
        for turn in range(load.turns):
            count = source.randint(load.new_min, load.new_max) if turn else 0
            new = tokens(f"{load.seed}-{name}-{turn}", count, load.vocabulary)
            turns.append(Turn(new, source.randint(load.answer_min, load.answer_max)))
        said = tokens(f"{load.seed}-{name}", history, load.vocabulary)
        made.append(Chat(name, said, turns))
    return made


def singles(load: Load, when: str) -> list[Single]:
    """Prompts for one at a time, the kinds in turn.

    Args:
        when: part of the seed: the prompts of another time share no block with these.
    """
    kinds = {
        "whole": (load.whole_tokens, 0, 1),
        "ragged": (load.ragged_tokens, 0, 1),
        "extended": (load.stored_tokens, load.extend_tokens, 1),
        "decoded": (load.stored_tokens, load.extend_tokens, load.decoded_tokens),
    }
    made = []
    for number in range(load.singles):
        for kind, (stored, more, answer) in kinds.items():
            name = f"{when}-{kind}-{number}"
            base = f"{load.seed}-{name}"
            extensions = [
                tokens(f"{base}-{turn}", more, load.vocabulary)
                for turn in range(load.singles_rounds)
            ]
            made.append(
                Single(kind, name, tokens(base, stored, load.vocabulary), extensions, answer)
            )
    return made
