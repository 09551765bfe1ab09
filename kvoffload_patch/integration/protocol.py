"""What the engine's side and the workers' side share: names, answers by RPC, and a size.

Attributes on vLLM's objects carry the plan to the workers and the result back; the answers are
plain data, errors included. Nothing else passes between `engine/` and `worker/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvoffload_patch.config import Settings

# Names of our attributes on vLLM's objects.
TIER = "_kvoffload_tier"  # on Scheduler and the model runner
PLAN = "kvoffload_plan"  # on SchedulerOutput
RESULT = "kvoffload_result"  # on ModelRunnerOutput
CONTROL = "_kvoffload_control"  # on EngineCore


def attached(owner: Any) -> Any:
    """The tier attached to a vLLM object, or None."""
    return owner.__dict__.get(TIER)


def num_engines(vllm_config: Any) -> int:
    """Data-parallel engines of the server."""
    return max(1, getattr(vllm_config.parallel_config, "data_parallel_size", 1))


def engine_number(vllm_config: Any) -> int:
    """Which of the server's data-parallel engines it is: the label ``engine`` of /metrics.

    From 0.14 on the rank is 0 in all of them where the model has no experts.
    """
    parallel = vllm_config.parallel_config
    rank = getattr(parallel, "data_parallel_rank", 0)
    return int(getattr(parallel, "data_parallel_index", rank))


def is_told_apart(vllm_config: Any) -> bool:
    """Whether this is not the first engine of a server whose engines are told that each is alone.

    So they are from vLLM 0.14 on where the model has no experts. How many they are is not said.
    """
    parallel = vllm_config.parallel_config
    local = getattr(parallel, "data_parallel_rank_local", None)
    return bool(local) and num_engines(vllm_config) == 1


def engine_bytes(vllm_config: Any, settings: Settings) -> int | None:
    """What one engine's ranks hold together: the server's size over its data-parallel engines.

    None: auto, a share of what each host can give.
    """
    whole = settings.cpu_bytes
    return None if whole is None else whole // num_engines(vllm_config)


@dataclass(frozen=True)
class RankGeometry:
    """What a rank says of itself before a tier is opened. ``error``: why it cannot take part.

    A block takes ``slot_bytes`` of CPU memory. ``available_bytes`` are without the
    ``early_bytes`` that the rank has taken already, and so are ``shareable_bytes``, of which an
    automatic tier takes a share. Ranks with the same ``same_bytes``, unless that is empty, hold
    the same bytes in every block. Of ``of_ranks``, itself included, it carries out each step
    together with the others. ``version`` is that of this package where the rank runs.
    """

    rank: int
    host: str
    pid: int
    block_bytes: int = 0
    slot_bytes: int = 0
    num_blocks: int = 0
    device: str = ""
    available_bytes: int = 0
    shareable_bytes: int = 0
    early_bytes: int = 0
    same_bytes: str = ""
    of_ranks: int = 1
    version: str = ""
    error: str = ""


@dataclass(frozen=True)
class RankOpened:
    """What a rank says when its tier is open.

    Slots usable so far, whether they become more while it serves, milliseconds that a block takes
    to load, how blocks are copied, which part of a load may be on its way when the step that reads
    it begins, and whether loads can be compared with checksums.
    """

    rank: int
    pid: int
    num_ready: int = 0
    growing: bool = False
    load_ms_per_block: float = 0.0
    copies: str = ""
    overlap: float = 0.0
    compares: bool = False
    error: str = ""
