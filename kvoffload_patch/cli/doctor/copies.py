"""How fast blocks could move here, measured in a child process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvoffload_patch.cli.doctor.child import ask
from kvoffload_patch.cli.doctor.findings import Finding

TIMEOUT_S = 120.0
# Half of what eight lanes of PCIe 3 carry: fewer lanes, or memory that was not pinned.
SLOW_GB_PER_S = 4.0


def check(gpu: bool) -> list[Finding]:
    """The bus of the first GPU, or CPU memory where there is none."""
    where = "gpu" if gpu else "memory"
    code = f"from kvoffload_patch.cli.doctor import copy_speed; copy_speed.main({where!r})"
    return judge(ask(code, TIMEOUT_S, KVOFFLOAD_DISABLE="1"))


def judge(found: Mapping[str, Any]) -> list[Finding]:
    """What the child's answer means."""
    if "error" in found:
        problem = f"copies could not be measured ({found['error']})"
        remedy = "look whether torch and its driver work here"
        return [Finding("copies", "bandwidth", "unknown", None, problem, remedy)]
    if "memory" in found:
        text = f"{found['memory']} GB/s within CPU memory, one thread; no GPU"
        return [Finding("copies", "bandwidth", text, dict(found))]
    slow = min(found["to_cpu"], found["to_gpu"]) < SLOW_GB_PER_S
    return [
        Finding(
            "copies",
            "bandwidth",
            f"{found['to_gpu']} GB/s to {found['gpu']}, {found['to_cpu']} GB/s from it",
            dict(found),
            problem="the bus is slow, so loads gain little over computing again" if slow else "",
            remedy="look at the link's width and speed (nvidia-smi -q), and what else uses it"
            if slow
            else "",
        )
    ]
