"""What can be wrong with bytes. Every message is one sentence."""

from __future__ import annotations

from typing import NamedTuple

from kvoffload_patch.links import LATE, NO_SLOTS, NOT_STORED, RAISED


class TransferError(RuntimeError):
    """Base of the errors of this package.

    Attributes:
        reason: one of `links.FAILURES`, where a copy fails by it.
    """

    reason = RAISED


class LayoutRefused(TransferError):
    """KV tensors whose shape or strides are not understood."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"KV layout not understood: {found}; report it with the model, or set "
            "KVOFFLOAD_STRICT=0 to serve without the CPU tier."
        )


class CanaryFailed(TransferError):
    """A block written, evicted and read back is not the block that was written."""


class CopyLate(TransferError):
    """A copy that was queued past its deadline."""

    reason = LATE


class NoSlots(TransferError):
    """CPU slots that a copy needs will never be usable."""

    reason = NO_SLOTS


class CannotRegister(TransferError):
    """No memory can be registered with the driver, however little."""


class NotStored(TransferError):
    """What a copy reads was never stored on this rank."""

    reason = NOT_STORED


class CopyFailed(NamedTuple):
    """Why a copy failed: one of `links.FAILURES`, and a sentence."""

    reason: str
    text: str


def failed_by(error: BaseException) -> CopyFailed:
    """What a copy that raised has failed by."""
    reason = error.reason if isinstance(error, TransferError) else RAISED
    return CopyFailed(reason, one_line(error))


def one_line(error: BaseException) -> str:
    """What an error says, for a sentence; its kind if it says nothing."""
    return " ".join(f"{error}".split()) or type(error).__name__
