"""What an error says, in one line."""

from __future__ import annotations

import pytest

from kvoffload_patch.transfer.errors import CanaryFailed, LayoutRefused, TransferError, one_line


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
