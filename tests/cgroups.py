"""Memory cgroups of this machine, where tests may make some."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def limited(nbytes: int) -> Iterator[Path]:
    """The folder of a new group with so many bytes; the test is skipped where there can be none."""
    name = f"kvoffload-test-{os.getpid()}"
    for folder, file in (
        (Path("/sys/fs/cgroup/memory") / name, "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup") / name, "memory.max"),
    ):
        if _made(folder, file, nbytes):
            try:
                yield folder
            finally:
                _remove(folder)
            return
    pytest.skip("needs a memory cgroup in which groups can be made")


def _made(folder: Path, file: str, nbytes: int) -> bool:
    try:
        folder.mkdir()
    except OSError:
        return False
    try:
        (folder / file).write_text(str(nbytes))
    except OSError:
        folder.rmdir()
        return False
    return True


def _remove(folder: Path) -> None:
    """Once its last process is gone, which takes a moment."""
    for _ in range(100):
        with suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.1)
