"""A rank without its tier: one that could not be finished, and steps that rely on one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NoReturn

from kvoffload_patch.plan import TransferPlan

logger = logging.getLogger("vllm.kvoffload_patch")


def check_reads_nothing(plan: TransferPlan | None) -> None:
    """A step comes to a rank without its tier: it was closed since the step was sent.

    Raises:
        RuntimeError: the step reads loads of the tier, which may not have been carried out.
    """
    if plan is not None and plan.promised:
        raise RuntimeError(
            "kvoffload_patch: expected the CPU tier of this rank to be open for a step that reads "
            "its loads, found it closed, so the step may lack bytes that were promised to it; "
            "restart the server, or set KVOFFLOAD_DISABLE=1 to serve without it."
        )


class LostTier:
    """It begins and ends no step: blocks may lack what was promised, or copies may write to them.

    Args:
        why: what finishing has raised.
        end: ends this process, of which nobody hears an error; None: it is heard, or not to end.
    """

    def __init__(self, why: BaseException, end: Callable[[], object] | None = None) -> None:
        self._why = " ".join(f"{why}".split()) or type(why).__name__
        self._end = end

    def begin_step(self, plan: object, step: object) -> NoReturn:
        """Raises RuntimeError, or ends this process."""
        self._refuse()

    def end_step(self, output: object) -> NoReturn:
        """As `begin_step`: the tier was lost within the step, whose output would be believed."""
        self._refuse()

    def step_raised(self) -> None:
        """It was the step of the tier before, and what vLLM has raised is told."""

    def close(self) -> None:
        """Nothing can be given back."""

    def _refuse(self) -> NoReturn:
        text = (
            f"kvoffload_patch: expected the CPU tier of this rank to be finished, found that it "
            f"could not be ({self._why}), so a step may lack bytes that were promised to it; "
            "restart the server, or set KVOFFLOAD_DISABLE=1 to serve without it."
        )
        if self._end is not None:
            logger.error("%s", text)
            self._end()
        raise RuntimeError(text)
