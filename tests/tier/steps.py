"""How much Python a call of the tier runs, counted, so that it is the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from kvoffload_patch import tier

FOLDER = str(tier.__path__[0])


def steps_of(call: Callable[[], object]) -> int:
    """Instructions of Python that the tier runs in this call; what C code walks is not seen."""
    steps = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal steps
        if event == "opcode":
            steps += 1
        elif not frame.f_code.co_filename.startswith(FOLDER):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
    return steps
