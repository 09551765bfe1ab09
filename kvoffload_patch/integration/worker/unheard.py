"""The tier of a rank whose result and whose errors the engine does not get."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvoffload_patch.config import as_given
from kvoffload_patch.integration.worker.tier import RankTier
from kvoffload_patch.plan import TransferPlan

logger = logging.getLogger("vllm.kvoffload_patch")


class UnheardRank(RankTier):
    """Raises nothing within a step: vLLM would leave the other ranks, and the engine, waiting.

    It says in the board that its step has failed, and lets it go on. The engine sees that before
    it gives the step's tokens away, and ends. Without a board the process of this rank ends, which
    vLLM notices; where that is not to be ended, the error is raised as on any other rank.
    """

    def __init__(self, runner: Any, num_slots: int, **how: Any) -> None:
        super().__init__(runner, num_slots, **how)
        self.ends: Callable[[], object] | None = how.get("end")
        if self._board is None:
            self.failed_blocks = (
                "the engine does not hear of it, as the ranks share no memory, and ends before the "
                "first step that needs its blocks is carried out"
            )

    def finish(self, plan: TransferPlan | None) -> None:
        """As `RankTier.finish`, which an RPC calls, so it is heard.

        Raises:
            RuntimeError: as there, or something was said that the engine may not have seen.
        """
        super().finish(plan)
        if self._board is not None and self._board.alarm:
            raise RuntimeError(
                "kvoffload_patch: expected all steps of this rank to be carried out with the bytes "
                "that they read, found that one was not; restart the server."
            )

    def _tell(self, error: Exception) -> None:
        """The step goes on, and ends with vLLM's own output."""
        why = as_given(f"{error}" or type(error).__name__).removeprefix("kvoffload_patch: ")
        text = "kvoffload_patch: this rank could not carry out its part of a step: %s"
        logger.error(text, why, exc_info=error)
        if self._board is not None:
            self._board.ring()
        elif self.ends is not None:
            self.ends()
        else:
            raise error
