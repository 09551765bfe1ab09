"""Backends, opened over layouts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transfer.layouts import build
from transfer.opened import Open, Opened


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens a backend; closed when the test is over."""
    made: list[Opened] = []

    def open_one(
        layout: str, name: str, device: str, dtype: Any = torch.bfloat16, **how: Any
    ) -> Opened:
        made.append(Opened(build(layout, dtype, device=device), name, device, **how))
        return made[-1]

    yield open_one
    for setup in made:
        setup.close()
