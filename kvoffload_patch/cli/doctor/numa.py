"""NUMA nodes, where the GPUs are, and whose memory this process may use."""

from __future__ import annotations

from pathlib import Path

from kvoffload_patch.cli.doctor.findings import Finding

_NVIDIA, _DISPLAY = "0x10de", "0x03"


def check(root: Path = Path("/")) -> list[Finding]:
    """One finding for the nodes, one for each GPU that says where it is."""
    nodes = sorted(
        int(path.name[4:]) for path in (root / "sys/devices/system/node").glob("node[0-9]*")
    )
    allowed = _allowed(root, nodes)
    listed = ", ".join(map(str, allowed))
    which = "" if allowed == nodes else f", of which this process may use {listed}"
    found = Finding(
        "NUMA", "nodes", f"{max(1, len(nodes))}{which}", {"nodes": nodes, "allowed": allowed}
    )
    return [found, *(_gpu(name, node, allowed) for name, node in _gpus(root))]


def has_gpu(root: Path = Path("/")) -> bool:
    """Whether a driver for a GPU that computes is there; imports nothing to find out."""
    return any((root / name).exists() for name in ("dev/nvidiactl", "dev/kfd", "dev/dxg"))


def _gpu(name: str, node: int, allowed: list[int]) -> Finding:
    away = node >= 0 and node not in allowed
    return Finding(
        "NUMA",
        f"GPU {name}",
        f"on node {node}" if node >= 0 else "on no node in particular",
        node,
        problem=f"GPU {name} is on node {node}, whose memory this process may not use, so copies"
        " cross to another socket"
        if away
        else "",
        remedy=f"allow node {node} (numactl --membind, or the container's cpuset)" if away else "",
    )


def _gpus(root: Path) -> list[tuple[str, int]]:
    found = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        if _text(device / "vendor") == _NVIDIA and _text(device / "class").startswith(_DISPLAY):
            node = _text(device / "numa_node")
            found.append((device.name, int(node) if node.lstrip("-").isdigit() else -1))
    return found


def _allowed(root: Path, nodes: list[int]) -> list[int]:
    """The nodes in "Mems_allowed_list: 0-1,3" of this process; all where nothing tells."""
    for line in _text(root / "proc/self/status").splitlines():
        key, _, text = line.partition(":")
        if key == "Mems_allowed_list":
            spans = [span.partition("-") for span in text.strip().split(",")]
            asked = {n for a, _, b in spans for n in range(int(a), int(b or a) + 1)}
            return [node for node in nodes if node in asked]
    return nodes


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
