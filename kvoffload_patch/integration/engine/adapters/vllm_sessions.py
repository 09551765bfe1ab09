"""Streaming sessions, which go on with more input when a turn has been answered (from 0.15 on)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_GOES_ON = "_update_request_as_session"


def key_mender(scheduler: Any) -> Callable[[Any], None]:
    """What to call with a session before it gets more input, so that its blocks get right keys.

    Up to 0.32 a session keeps as many tokens as it has computed. Up to 0.31 the hash stays of a
    block that a forgotten token has ended. Where it computed drafts behind its end, up to 0.32,
    the next tokens would count as computed. Both give blocks the keys of other tokens.

    Args:
        scheduler: a `vllm.v1.core.sched.scheduler.Scheduler`, constructed.
    """
    goes_on = getattr(type(scheduler), _GOES_ON, None)
    if goes_on is None or "keep_end" in goes_on.__code__.co_varnames:
        return _right_by_itself
    hash_size = int(scheduler.kv_cache_manager.block_pool.hash_block_size)

    def mend(session: Any) -> None:
        session.num_computed_tokens = min(session.num_computed_tokens, session.num_tokens)
        del session.block_hashes[session.num_computed_tokens // hash_size :]

    return mend


def _right_by_itself(session: Any) -> None:
    """From 0.33 on; before 0.15 there are none."""
