"""The marker of this folder's slow tests."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """`-m "not releases"` leaves the scheduler half of other releases out."""
    config.addinivalue_line("markers", "releases: runs vLLM releases from their sources")
