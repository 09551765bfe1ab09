"""What an error says, in one line."""

from __future__ import annotations

import pytest

from kvoffload_patch.links import FAILURES, LATE, NO_SLOTS, NOT_STORED, RAISED
from kvoffload_patch.transfer.errors import (
    CanaryFailed,
    CopyLate,
    LayoutRefused,
    NoSlots,
    NotStored,
    TransferError,
    failed_by,
    one_line,
)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("no  such\n\tdriver"), "no such driver"),
        (KeyError(), "KeyError"),
        (ValueError(" \n"), "ValueError"),
        (TransferError("expected this."), "expected this."),
    ],
)
def test_an_error_in_one_line_or_its_kind(error: Exception, said: str) -> None:
    assert one_line(error) == said


def test_one_base_for_all_of_them() -> None:
    assert issubclass(LayoutRefused, TransferError) and issubclass(CanaryFailed, TransferError)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError("a driver's"), RAISED),
        (TransferError("x"), RAISED),
        (CopyLate("x"), LATE),
        (NoSlots("x"), NO_SLOTS),
        (NotStored("x"), NOT_STORED),
        # Other errors have a `reason` of their own.
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "late"), RAISED),
    ],
)
def test_what_a_copy_failed_by(error: Exception, reason: str) -> None:
    assert failed_by(error) == (reason, one_line(error)) and reason in FAILURES
