"""Whether the tier may be used on a rank's device: where it never ran, the user has to ask."""

from __future__ import annotations

import logging
from typing import Any

from kvoffload_patch.config import Settings

logger = logging.getLogger("vllm.kvoffload_patch")


def why_refused(device: Any) -> str:
    """Why a torch device is refused; empty if it is not.

    Raises:
        TransferError: it is of a kind that nothing copies on.
    """
    kind = _never_run(device)
    if not kind or Settings.from_env().allow_unverified:
        return ""
    return (
        f"expected a device on which the tier was run (the CPU or CUDA), found {kind}; set "
        "KVOFFLOAD_ALLOW_UNVERIFIED=1 to try it, and compare its answers with those without it"
    )


def warn_if_never_run(device: Any) -> None:
    """Say that a device is used because the user wants it."""
    kind = _never_run(device)
    if kind:
        logger.warning(
            "kvoffload_patch: KVOFFLOAD_ALLOW_UNVERIFIED uses the tier on a device of a kind on "
            "which it was never run: %s; compare its answers with those without it.", kind,
        )  # fmt: skip


def _never_run(device: Any) -> str:
    from kvoffload_patch.transfer.device import device_of

    return device_of(device).not_run
