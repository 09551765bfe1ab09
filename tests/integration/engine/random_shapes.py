"""What a random run may have of KV cache groups, by the shape that it is asked for."""

from __future__ import annotations

import random
from typing import Any

# As in scheduler_half.states, which a release must be chosen before.
STATE, CHECKPOINTS, EVERY = "state", "state with checkpoints", "state at every block"
PARTS = "parts"  # states, and hits that may end within a block
CHUNKS = "chunks"  # attention within chunks
CONNECTOR = "connector"  # beside a KV connector: none of these, or `connector+state`
DRAFTS = "drafts"  # beside speculative decoding: none of these, or `drafts+state`
SHARDS = "shards"  # ranks have a part of each block: none of these, or `shards+state`
REPLICATED = "replicated"  # beside drafts: a group of their own that ranks do not divide
UNCACHED = "uncached"  # groups beside full attention that take no part in the prefix cache
SHAPES = (STATE, CHECKPOINTS, EVERY, PARTS, CHUNKS, CONNECTOR, DRAFTS, SHARDS, REPLICATED, UNCACHED)
WINDOW = 40  # of those that no shape is asked for
MAX_TOKENS = 340  # of a prompt and its answer: more than a step takes, and the GPU has room


def keeps_the_end() -> bool:
    """Whether vLLM keeps the state behind all of a prompt, and not behind all but one token."""
    from packaging.version import Version

    from kvoffload_patch.integration.install import release_in_use

    return Version(release_in_use()) < Version("0.32")


def connector(mini: Any, seed: int) -> Any:
    """A connector that is attached to an engine; None on a release that lacks what it needs.

    That is, from 0.11.1 on, that a step's output says which blocks were not filled. Up to 0.10.0
    it says nothing of connectors, and up to 0.11.0 vLLM itself answers wrongly beside this one, as
    beside a tier that is paused all the time.
    """
    from vllm.v1 import outputs

    said = getattr(outputs, "KVConnectorOutput", None)
    if "invalid_block_ids" not in getattr(said, "__dataclass_fields__", ()):
        return None
    from integration.engine.connectors import RandomConnector

    return RandomConnector(mini, seed)


def unit(seed: int, asynchronous: bool) -> int:
    """Tokens after which a hit may end.

    With asynchronous scheduling and one token, a vLLM that keeps the state behind all of a prompt
    gives wrong answers without a tier, too: the next step writes to it.
    """
    fails = asynchronous and keeps_the_end()
    return random.Random(f"unit {seed}").choice([4, 8] if fails else [1, 4, 8])


def retention(seed: int, windows: tuple[Any, ...], shape: str | None) -> int | None:
    """Of windows and states vLLM keeps by default (from 0.30 on) those of a prompt's end alone.

    It takes nothing but that and None where a model has neither in its prefix cache.
    """
    drawn = random.Random(f"retention {seed}").choice([None, 0, 0, 64])
    sparse = any(one is not None and not has_drafting_group((one,)) for one in windows)
    return drawn if sparse and shape not in (UNCACHED, CHUNKS) else None


def least_blocks(windows: tuple[Any, ...]) -> int:
    """GPU blocks with which vLLM admits any request: of a state at every block it counts all."""
    if len(windows) == 1:
        return 0
    return 80 if windows.count(EVERY) > 1 else 49


def beside_drafts(about: dict[str, Any]) -> None:
    """Make an engine one that can draft: with one step at a time if it is not asynchronous.

    Up to 0.25 vLLM hands blocks of a window out as if all drafts of the steps under way were
    accepted, and answers wrongly by itself.
    """
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    about["blocks"], about["lookahead"] = max(60, about["blocks"]), 0
    gives_up = getattr(KVCacheManager, "remove_skipped_blocks", None)
    if not about["asynchronous"]:
        about["in_flight"] = 1
    elif not gives_up or "processed_computed_tokens" not in gives_up.__code__.co_varnames:
        about["windows"] = tuple(one for one in about["windows"] if one != WINDOW) or (None,)


def hashed_ahead(seed: int, windows: tuple[Any, ...]) -> int:
    """Tokens behind a block that its key has as well: one, or with several MTP layers all (0.33).

    With two, vLLM itself fails at states alone, and gives wrong keys to those with checkpoints.
    """
    from vllm.v1.core.block_pool import BlockPool

    if "num_hash_lookahead_tokens" not in BlockPool.__init__.__code__.co_varnames:
        return 0
    several = seed % 4 > 1 and None in windows and CHECKPOINTS not in windows
    return 1 + seed % 4 if several else min(1, seed % 4)


def divided(windows: tuple[Any, ...], shape: str | None) -> tuple[Any, ...]:
    """Full attention, of which ranks have parts, alone or beside what each has all of."""
    beside = windows if shape else ()
    return beside if None in beside else (None, *beside)


def has_drafting_group(windows: tuple[Any, ...]) -> bool:
    """Whether a drafting model's layers have a group of their own."""
    from scheduler_half.sizes import Replicated

    return any(isinstance(window, Replicated) for window in windows)


def groups(shape: str) -> list[tuple[Any, ...]]:
    from scheduler_half.device import Chunk, Replay, Ring
    from scheduler_half.sizes import BLOCK, Replicated

    if shape == REPLICATED:
        own = Replicated(BLOCK)
        return [(None, own), (None, STATE, own), (STATE, own, None)]
    if shape == CHUNKS:
        return [(None, Chunk(64)), (Chunk(32), None), (Chunk(48),)]
    if shape == PARTS:
        return [(None, STATE), (STATE, None, STATE)]
    if shape != UNCACHED:
        return [(None, shape), (shape, None, shape), (shape,)]
    return [(None, Replay(40)), (Replay(32), None, Ring(8)), (Ring(8), None)]
