"""How long the decision about the installed vLLM takes: python scripts/release time.

Every process of vLLM makes it once, before vLLM is imported. Prints the best of five, in CPU time,
with files that are known by their digests, as they are after an installation, and with others.
"""

from __future__ import annotations

import dataclasses
import time

from kvoffload_patch.integration.patch_table.points import POINTS, VLLM
from kvoffload_patch.integration.patch_table.verified import RECORDS
from kvoffload_patch.patching import Host, decide, installed_version


def milliseconds(host: Host) -> float:
    """The best of five."""
    version, best = installed_version(VLLM), float("inf")
    for _ in range(5):
        began = time.process_time()
        decide(host, POINTS, version)
        best = min(best, time.process_time() - began)
    return best * 1000


def main() -> None:
    """Print both."""
    unknown = dataclasses.replace(VLLM, records=dataclasses.replace(RECORDS, files={}))
    print(f"vLLM {installed_version(VLLM)}: {milliseconds(VLLM):.1f} ms where files are known,")
    print(f"{milliseconds(unknown):.0f} ms where each is parsed and compared")
