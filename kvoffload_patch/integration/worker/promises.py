"""Copies that steps on a rank have been promised: whether each has arrived, as far as is known."""

from __future__ import annotations

from typing import Any

from kvoffload_patch.config import as_given
from kvoffload_patch.plan import TransferPlan


def check_promises(engine: Any, plan: TransferPlan | None) -> None:
    """A step that reads a load which has failed must not compute.

    That a copy cannot be made is known once it is enqueued, which `CopyEngine.begin_step` has done
    with all that the step reads.

    Args:
        engine: of the rank's copies, a `CopyEngine`.

    Raises:
        RuntimeError: a copy that this plan promises has failed.
    """
    found = engine.failed(plan.promised) if plan is not None else None
    if found is None:
        return
    (source, target), ticket, reason = found
    raise RuntimeError(
        as_given(
            f"kvoffload_patch: expected copy {ticket} from {source} to {target} to arrive for the "
            f"step that reads it, found that it failed ({reason}); restart the server, and set "
            "KVOFFLOAD_LOAD_MODE=parked if it happens again, so that such a load is recomputed."
        )
    )


def wait_for_known(engine: Any, plan: TransferPlan) -> None:
    """Return when promised copies that are known to be done are done on this rank as well.

    They may have been compared with checksums, and what this rank finds is known only then; without
    checksums there is nothing to be found. Ranks that share memory have said that they are done, so
    only others ever wait.
    """
    known = [one for one in plan.promised if one[1] <= plan.known_done(one[0])]
    if known:
        engine.wait_done(known)
