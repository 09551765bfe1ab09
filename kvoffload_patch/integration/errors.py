"""Why there is no tier. Every message is one sentence: what, expected, found, remedy."""

from __future__ import annotations


class TierRefused(RuntimeError):
    """The tier cannot be right here; aborts unless KVOFFLOAD_STRICT=0."""


class PromiseBroken(RuntimeError):
    """Bytes were promised to a step and cannot be had: nothing but ending the engine is right."""


class TierNotNeeded(Exception):
    """vLLM is configured so that there is nothing for a tier to do; never aborts."""
