"""What this process has of the machine: pages, mappings, threads."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def resident_bytes() -> int:
    """Memory in use by this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def is_mapped(address: int) -> bool:
    """Whether an address belongs to a mapping."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return True
    return False


def kvoffload_threads() -> list[str]:
    """Our threads that are alive."""
    return [t.name for t in threading.enumerate() if t.name.startswith("kvoffload-")]
