"""A session that goes on: what is made right before vLLM gives it more input."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload_patch.integration.engine.adapters.vllm_sessions import key_mender


class Scheduler:
    """One whose sessions keep as many tokens as they have computed, as up to 0.32."""

    def __init__(self) -> None:
        pool = SimpleNamespace(hash_block_size=16)
        self.kv_cache_manager = SimpleNamespace(block_pool=pool)

    def _update_request_as_session(self, session: Any, update: Any) -> None:
        num_computed_tokens = session.num_computed_tokens
        del session.tokens[num_computed_tokens:]


class Right(Scheduler):
    """One that keeps all but the last token, as from 0.33 on."""

    def _update_request_as_session(self, session: Any, update: Any) -> None:
        keep_end = session.num_tokens - 1
        del session.tokens[keep_end:]


class Without:
    """One without sessions, as up to 0.14."""


@pytest.mark.parametrize(
    ("tokens", "computed", "kept", "hashes"),
    [
        (32, 31, 31, 1),  # the forgotten token has ended a block
        (33, 32, 32, 2),
        (23, 25, 23, 1),  # drafts behind its end were computed as well
        (15, 15, 15, 0),  # its last token was computed by a step under way
    ],
)
def test_what_a_session_keeps_has_hashes_and_nothing_else(
    tokens: int, computed: int, kept: int, hashes: int
) -> None:
    mend = key_mender(Scheduler())
    known = list(range(tokens // 16))
    session = SimpleNamespace(num_tokens=tokens, num_computed_tokens=computed, block_hashes=known)
    mend(session)
    assert session.num_computed_tokens == kept and len(session.block_hashes) == hashes


@pytest.mark.parametrize("scheduler", [Right(), Without()])
def test_other_releases_are_left_alone(scheduler: Any) -> None:
    session = SimpleNamespace(num_tokens=32, num_computed_tokens=31, block_hashes=[1, 2])
    key_mender(scheduler)(session)
    assert session.num_computed_tokens == 31 and len(session.block_hashes) == 2
