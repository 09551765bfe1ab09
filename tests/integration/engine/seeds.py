"""What tests of random runs share: each seed is played, and one that fails says what it was."""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

_SHOWN_LINES = 14  # of what a run has raised


def played(
    run: Callable[[int], Counter[str]], seeds: Iterable[int], describe: Callable[[int], Any]
) -> Counter[str]:
    """What has happened in the runs of all seeds.

    Raises:
        AssertionError: one of them has failed.
    """
    seen = Counter[str]()
    for seed in seeds:
        try:
            seen += run(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {describe(seed)}") from error
    return seen


def play(
    run: Callable[..., Counter[str]],
    describe: Callable[[int], Any],
    first: str,
    count: str,
    release: str = "",
    folder: str = "",
) -> int:
    """Play so many seeds over a release's scheduler, and say what came out; 1 if any failed."""
    from integration.engine.random_runs import limits_of

    logging.disable()
    torch.set_num_threads(1)  # as tests/conftest.py says
    limits = limits_of(release, folder)
    seen, failed = Counter[str](), list[int]()
    for seed in range(int(first), int(first) + int(count)):
        try:
            seen += run(seed, *limits)
        except Exception:  # noqa: BLE001 - it is what came out
            failed.append(seed)
            lines = traceback.format_exc().splitlines(True)[-_SHOWN_LINES:]
            print(f"seed {seed}: {describe(seed)}\n{''.join(lines)}", flush=True)
    print(f"{dict(seen)}; failed: {failed}", flush=True)
    return int(bool(failed))
