"""What can be wrong with bytes. Every message is one sentence."""

from __future__ import annotations


class TransferError(RuntimeError):
    """Base of the errors of this package."""


class LayoutRefused(TransferError):
    """KV tensors whose shape or strides are not understood."""


class CanaryFailed(TransferError):
    """A block written, evicted and read back is not the block that was written."""


def one_line(error: BaseException) -> str:
    """What an error says, for a sentence; its kind if it says nothing."""
    return " ".join(f"{error}".split()) or type(error).__name__
