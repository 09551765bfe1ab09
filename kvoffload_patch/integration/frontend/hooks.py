"""Hooks on what vLLM's front end receives."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvoffload_patch.integration import carrier
from kvoffload_patch.integration.publisher import publish

logger = logging.getLogger("vllm.kvoffload_patch")

Wrapped = Callable[..., Any]


def decoder_init(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> None:
    """`MsgpackDecoder.__init__`: of messages from the engine core, the tier's figures are taken."""
    _init(wrapped, *args, **kwargs)


def _init(wrapped: Wrapped, t: Any = None, *args: Any, **kwargs: Any) -> None:
    if carrier.is_message(t):
        try:
            t = carrier.message_type(t, publish)
        except Exception as error:  # noqa: BLE001 - vLLM serves without our metrics
            logger.warning(
                "kvoffload_patch: /metrics has none of the CPU tier: %r; the tier works on, "
                "restart the server to have them.", error,
            )  # fmt: skip
    wrapped(t, *args, **kwargs)
