"""The step at which a tier is detached: what no rank was sent yet, and what sends none any more.

Decides nothing: the breaker says when.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NoReturn

from kvoffload_patch.integration.errors import PromiseBroken
from kvoffload_patch.integration.protocol import PLAN
from kvoffload_patch.plan import TransferPlan
from kvoffload_patch.tier.manager import OffloadManager


def refusing(text: str) -> Callable[..., NoReturn]:
    """A `schedule` after which no step is sent.

    What vLLM was asked for, such as a reset, has raised, and is answered by that alone: the engine
    goes on to its next step.
    """

    def schedule(*_: Any, **__: Any) -> NoReturn:
        raise PromiseBroken(text)

    return schedule


def take_unsent(manager: OffloadManager, output: Any) -> TransferPlan | None:
    """The loads that no rank knows of yet, as a plan without stores; None if there are none.

    Args:
        output: of `schedule`, before it goes to the ranks, or None; its plan is taken off.
    """
    plan: TransferPlan | None = getattr(output, PLAN, None)
    if plan is not None:
        delattr(output, PLAN)
        return plan._replace(after=())
    return manager.make_plan(_never)


def _never(gpu_block_id: int, key: Hashable) -> bool:
    """No block is stored any more."""
    return False
