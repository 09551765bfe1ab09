"""What tests of random runs share: each seed is played, and one that fails says what it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any


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
