"""Why there is no tier. Every message is one sentence: what, expected, found, remedy."""

from __future__ import annotations


class TierRefused(RuntimeError):
    """The tier cannot be right here; aborts unless KVOFFLOAD_STRICT=0."""


class TierNotNeeded(Exception):
    """vLLM is configured so that there is nothing for a tier to do; never aborts."""
