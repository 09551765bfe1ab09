"""Which node a GPU hangs on, and memory bound to one."""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from kvoffload_patch.transfer.memory import numa
from kvoffload_patch.transfer.memory.mapping import HostMapping

CUDA = torch.device("cuda", 1)


class Driver:
    """libcuda with devices at these PCI ids."""

    ids = (b"0000:01:00.0", b"0000:AF:00.0")

    def cuDeviceGet(self, handle: Any, index: int) -> int:
        handle._obj.value = index + 40
        return 0 if index < 2 else 101

    def cuDeviceGetPCIBusId(self, text: Any, size: int, handle: Any) -> int:
        text.value = self.ids[handle.value - 40]
        return 0


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for node in range(2):
        (tmp_path / f"sys/devices/system/node/node{node}").mkdir(parents=True)
    for name, node in (("0000:01:00.0", 0), ("0000:af:00.0", 1)):
        device = tmp_path / "sys/bus/pci/devices" / name
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    monkeypatch.setattr(numa.ctypes, "CDLL", lambda name: Driver())
    return tmp_path


def test_the_node_is_that_of_the_pci_device(machine: Path) -> None:
    assert numa.node_of(CUDA, machine) == 1
    assert numa.node_of(torch.device("cuda", 0), machine) == 0


def test_a_machine_with_one_node_needs_no_choice(machine: Path) -> None:
    (machine / "sys/devices/system/node/node1").rmdir()
    assert numa.node_of(CUDA, machine) is None


def test_a_device_without_a_node_has_none(machine: Path) -> None:
    (machine / "sys/bus/pci/devices/0000:af:00.0/numa_node").write_text("-1\n")
    assert numa.node_of(CUDA, machine) is None
    (machine / "sys/bus/pci/devices/0000:af:00.0/numa_node").unlink()
    assert numa.node_of(CUDA, machine) is None


def test_a_device_that_the_driver_does_not_know_has_none(machine: Path) -> None:
    assert numa.node_of(torch.device("cuda", 2), machine) is None


def test_without_a_driver_there_is_none(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(numa.ctypes, "CDLL", missing)
    assert numa.node_of(CUDA, machine) is None


def test_memory_prefers_the_node_it_is_given() -> None:
    host = HostMapping(4 << 20)
    if not numa.prefer_node(host.memory.data_ptr(), 4 << 20, 0):
        assert ctypes.get_errno() in (errno.EPERM, errno.ENOSYS)
        pytest.skip("this system does not let a process choose nodes")
    address = f"{host.memory.data_ptr():x} "
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    (policy,) = [line.split()[1] for line in lines if line.startswith(address)]
    assert policy.startswith("prefer") and policy.endswith(":0")
    host.close()


def test_a_node_that_is_not_there_is_no_error() -> None:
    host = HostMapping(4 << 20)
    assert not numa.prefer_node(host.memory.data_ptr(), 4 << 20, 200)
    host.close()


def test_another_kind_of_machine_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def unused(*args: Any, **kwargs: Any) -> ctypes.CDLL:
        raise AssertionError("a system call with an unknown number")

    monkeypatch.setattr(numa.platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(numa.ctypes, "CDLL", unused)
    assert not numa.prefer_node(0, 4096, 0)
