"""The sizes that `bench serve` runs with: the load, and the engines that it is put on."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from scripts import Refused

# Which scenarios an engine plays, in this order: S1 needs what S3 left in CPU memory, and S2 pushes
# everything else out of it.
ENGINES = {
    "main": ("s3", "s1", "s4", "s2"),
    "long": ("s1long", "one"),
    "graphs": ("s4graphs",),
    "tokens": ("tokens",),
    "pressure": ("pressure",),
    "pressure_tokens": ("pressure_tokens",),
}
# Of these starts are counted, also of one that plays nothing.
STARTS = {"main": "start", "graphs": "startgraphs"}
S = TypeVar("S")
SCENARIOS = (*(name for names in ENGINES.values() for name in names), *STARTS.values())


@dataclass(frozen=True)
class Sizes:
    """Tokens, requests and blocks; the defaults are those of the published baselines."""

    block_size: int = 16
    vocabulary: int = 128_000
    max_num_seqs: int = 64
    max_model_len: int = 40_000
    gpu_blocks: int = 12_000
    cpu_gib: float = 72.0
    offloading_gib: float = 64.0  # for OffloadingConnector and LMCache, which pin more than asked
    # S3: sessions that the GPU cannot hold together; the first turn is cold.
    s3_sessions: int = 60
    s3_tokens: int = 8192
    s3_answer: int = 32
    s3_extend: int = 32
    s3_turns: int = 4
    # S1: a prompt of S3 that has left the GPU; and long prompts in rotation, in their own engine.
    s1_requests: int = 6
    s1long_tokens: int = 16_384
    s1long_requests: int = 6
    s1long_rounds: int = 2
    s1long_gpu_blocks: int = 3000
    s1long_cpu_gib: float = 40.0
    settle_s: float = 0.0  # from an engine's start to its first request: some tiers still grow then
    # S2: no hit is possible.
    s2_requests: int = 200
    s2_tokens: int = 2048
    s2_answer: int = 64
    s2_repeats: int = 3
    # S4: decodes that run through each phase, and prompts that arrive meanwhile.
    s4_decodes: int = 32
    s4_decode_prompt: int = 128
    s4_prompts: int = 28
    s4_tokens: int = 8192
    s4_extend: int = 32  # new tokens of each arrival, behind what was there before
    s4_resident: int = 4  # prompts that stay on the GPU; 0 leaves that phase out
    s4_rate: float = 4.0
    s4_seconds: float = 8.0
    s4_repeats: int = 2
    s4_quiet_every: int = 1  # rounds; quiet phases differ little
    # The check of answers: a small model of its own, whose GPU cache holds few of the prompts.
    tokens_vocabulary: int = 1000
    tokens_prompts: int = 12
    tokens_tokens: int = 784  # 896 in the third turn: whole blocks of 16 or 128 tokens
    tokens_answer: int = 16
    tokens_gpu_blocks: int = 140
    tokens_all_gpu_blocks: int = 4000
    tokens_max_model_len: int = 2048
    # Pressure: chats at once whose KV is three times the GPU's cache in the end, and the same on
    # the model of the check of answers.
    pressure_chats: int = 48
    pressure_history: int = 2600
    pressure_new: int = 100
    pressure_answer_min: int = 200
    pressure_answer_max: int = 600
    pressure_turns: int = 3
    pressure_gpu_blocks: int = 4000
    pressure_cpu_gib: float = 32.0
    pressure_tokens_chats: int = 24
    pressure_tokens_history: int = 384
    pressure_tokens_answer_min: int = 64
    pressure_tokens_answer_max: int = 256
    pressure_tokens_gpu_blocks: int = 533


def with_changes(sizes: S, changes: list[str]) -> S:
    """A frozen dataclass of numbers and texts with ``name=value`` applied.

    Raises:
        Refused: an unknown name or a value of the wrong type.
    """
    record: Any = sizes
    kinds = {field.name: type(getattr(sizes, field.name)) for field in fields(record)}
    values: dict[str, Any] = {}
    for change in changes:
        name, _, text = change.partition("=")
        if name not in kinds:
            raise Refused(f"--set {change}: expected one of {', '.join(kinds)}")
        try:
            values[name] = kinds[name](text)
        except ValueError:
            wanted = "a whole number" if kinds[name] is int else "a number"
            raise Refused(f"--set {change}: expected {wanted}, found {text!r}") from None
    made: S = replace(record, **values)
    return made


# For a tiny model on a CPU, to see that the benchmark works; the numbers mean nothing.
SMALL = Sizes(
    block_size=128,
    vocabulary=1000,
    max_num_seqs=16,
    max_model_len=3072,
    gpu_blocks=64,
    cpu_gib=0.25,
    offloading_gib=0.25,
    s3_sessions=10,
    s3_tokens=1024,
    s3_answer=8,
    s3_extend=8,
    s3_turns=3,
    s1_requests=2,
    s1long_tokens=2048,
    s1long_requests=3,
    s1long_rounds=2,
    s1long_gpu_blocks=34,
    s1long_cpu_gib=0.25,
    s2_requests=24,
    s2_tokens=256,
    s2_answer=8,
    s2_repeats=2,
    s4_decodes=4,
    s4_decode_prompt=64,
    s4_prompts=12,
    s4_tokens=1024,
    s4_resident=2,
    s4_rate=2.0,
    s4_seconds=3.0,
    s4_repeats=1,
    tokens_prompts=6,
    tokens_gpu_blocks=24,
    tokens_all_gpu_blocks=100,
    pressure_chats=12,
    pressure_history=300,
    pressure_new=40,
    pressure_answer_min=80,
    pressure_answer_max=240,
    pressure_gpu_blocks=28,
    pressure_cpu_gib=0.25,
    pressure_tokens_chats=10,
    pressure_tokens_gpu_blocks=26,
)
