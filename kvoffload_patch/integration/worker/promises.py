"""Copies that steps on a rank have been promised: whether each has arrived, as far as is known."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvoffload_patch.config import as_given
from kvoffload_patch.integration.worker.vllm_runner import check_when_taken
from kvoffload_patch.links import Tickets
from kvoffload_patch.tier.plan import TransferPlan


class Promises:
    """A step that reads a load which has failed must not give any token away.

    Bytes that are wrong are known once the load is done: a promise is kept in mind until then.

    Args:
        engine: of the rank's copies, a `CopyEngine`.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._promised: Tickets = ()

    def add(self, plan: TransferPlan | None) -> None:
        """What a step with this plan may read from now on."""
        if plan is not None:
            self._promised += plan.promised

    def check(self) -> None:
        """Forget what has arrived.

        Raises:
            RuntimeError: a copy has failed.
        """
        if not self._promised:
            return
        promised, self._promised = self._promised, self._engine.under_way(self._promised)
        broken = _broken(self._engine, promised)
        if broken:
            raise RuntimeError(broken)

    def wait(self) -> None:
        """Return when every copy is done."""
        if self._promised:
            self._engine.wait_done(self._promised)

    def watch(self, output: Any) -> None:
        """Have a step's asynchronous output say of what has failed by the time it is whole."""
        if self._promised:
            check_when_taken(output, partial(_broken_by_now, self._engine, self._promised))


def _broken(engine: Any, promised: Tickets) -> str:
    """Which of these copies has failed, and what to do; empty if none is known to have."""
    found = engine.failed(promised)
    if found is None:
        return ""
    (source, target), ticket, reason = found
    return as_given(
        f"kvoffload_patch: expected copy {ticket} from {source} to {target} to arrive for the step "
        f"that reads it, found that it failed ({reason}); restart the server, and set "
        "KVOFFLOAD_LOAD_MODE=parked if it happens again, so that such a load is recomputed."
    )


def _broken_by_now(engine: Any, promised: Tickets) -> str:
    """The same of copies that are over; also when the rank's tier was closed meanwhile."""
    engine.under_way(promised)  # what is wrong with bytes is known once that was asked
    return _broken(engine, promised)
