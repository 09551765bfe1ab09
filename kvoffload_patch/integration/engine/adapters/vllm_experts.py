"""Which experts computed each token, of which vLLM keeps records apart from the blocks."""

from __future__ import annotations

from typing import Any


class ExpertRecords:
    """vLLM's records of one scheduler: a hit must have them, and the tier's blocks keep theirs.

    With --enable-return-routed-experts an answer says which experts computed each token, those of a
    hit included. From 0.33 on the scheduler says which blocks' records the worker keeps: those that
    the GPU has, and others that were used last, as many in all as the GPU has blocks.

    Args:
        kept: a `vllm.distributed.aux_output_connector.connector.AuxOutputSchedulerConnector`.
    """

    def __init__(self, kept: Any) -> None:
        self._kept = kept
        self._capacity = kept._capacity

    def keep(self, num_slots: int) -> None:
        """Records of so many blocks more are kept, those of blocks that the tier may have."""
        self._kept._capacity = self._capacity + num_slots

    def restore(self) -> None:
        """As many as before."""
        self._kept._capacity = self._capacity

    def most_tokens(self, request: Any) -> int:
        """The longest prefix of a request that has records; O(its blocks)."""
        return int(self._kept.max_cache_hit(request))

    def loading(self, request: Any, tokens: int) -> None:
        """A request waits for a prefix of so many tokens: its records are kept until it runs."""
        self._kept.request_loading(request, tokens)


def experts_of(scheduler: Any) -> ExpertRecords | None:
    """A scheduler's records; None if answers do not say which experts computed a token."""
    kept = getattr(scheduler, "aux_output_connector", None)
    return ExpertRecords(kept) if kept is not None else None


def limits_hits(scheduler: Any) -> bool:
    """Whether a scheduler that has such records knows which blocks have them; from 0.33 on."""
    return hasattr(getattr(scheduler, "aux_output_connector", None), "max_cache_hit")
