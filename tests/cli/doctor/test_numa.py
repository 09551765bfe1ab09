"""Nodes and GPUs, read from a made-up /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffload_patch.cli.doctor import numa


def machine(root: Path, nodes: int, allowed: str = "", gpu_node: str = "1") -> Path:
    for node in range(nodes):
        (root / f"sys/devices/system/node/node{node}").mkdir(parents=True)
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/status").write_text(
        f"Name: x\nMems_allowed_list:\t{allowed}\n" * bool(allowed)
    )
    for name, vendor, kind in (("0000:1b:00.0", "0x10de", "0x030200"), ("b", "0x8086", "0x030000")):
        device = root / "sys/bus/pci/devices" / name
        device.mkdir(parents=True)
        for file, text in (("vendor", vendor), ("class", kind), ("numa_node", gpu_node)):
            (device / file).write_text(f"{text}\n")
    return root


def test_a_gpu_beside_memory_that_may_be_used(tmp_path: Path) -> None:
    nodes, gpu = numa.check(machine(tmp_path, 2, "0-1"))
    assert nodes.found == "2" and nodes.value == {"nodes": [0, 1], "allowed": [0, 1]}
    assert (gpu.name, gpu.found, gpu.problem) == ("GPU 0000:1b:00.0", "on node 1", "")


@pytest.mark.parametrize("allowed", ["0", "0,2-3"])
def test_a_gpu_whose_memory_may_not_be_used(tmp_path: Path, allowed: str) -> None:
    nodes, gpu = numa.check(machine(tmp_path, 4, allowed))
    assert f"4, of which this process may use {allowed.replace('2-3', ' 2, 3')}" == nodes.found
    assert "copies cross" in gpu.problem and "node 1" in gpu.remedy and not gpu.refused


@pytest.mark.parametrize("node", ["-1", "", "x"])
def test_a_machine_that_tells_nothing(tmp_path: Path, node: str) -> None:
    nodes, gpu = numa.check(machine(tmp_path, 0, gpu_node=node))
    assert (nodes.found, gpu.found, gpu.problem) == ("1", "on no node in particular", "")
    assert numa.check(tmp_path / "nothing")[0].found == "1"


def test_a_gpu_is_seen_by_its_driver(tmp_path: Path) -> None:
    assert not numa.has_gpu(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert numa.has_gpu(tmp_path)
