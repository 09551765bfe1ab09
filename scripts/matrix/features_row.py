"""What a row of docs/features.md is."""

from __future__ import annotations

from typing import NamedTuple

ENGINE = "tests/engine/"
NOT_RUN = "not run"  # how a verdict begins, or ends, where there is no result


class Row(NamedTuple):
    """A shape or feature, and the tests that show it; without any it is not shown.

    ``gpu`` has kinds of engines of `tests/engine/gpu_kinds.py`, or a model runner for all that it
    was run with, on ``gpus`` GPUs; ``beside`` has packages of `neighbours` that its tests need;
    ``release`` is the one that its tests take for vLLM's, whichever is installed; ``only`` the one
    that it was played on, if it is known that others have not played it.
    """

    name: str
    what: str
    tests: tuple[str, ...] = ()
    gpu: tuple[str, ...] = ()
    gpus: int = 1
    beside: tuple[str, ...] = ()
    release: str = ""
    only: str = ""
