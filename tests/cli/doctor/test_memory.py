"""Readings of made-up machines: what is to be had, what limits it, what a tier would take."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffload_patch.cli.doctor import memory
from kvoffload_patch.cli.doctor.findings import Finding
from kvoffload_patch.config import GIB, Settings

MOUNT = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


def write(root: Path, path: str, text: object) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    kib = 1 << 20
    write(tmp_path, "proc/meminfo", f"MemTotal: {32 * kib} kB\nMemAvailable: {20 * kib} kB\n")
    write(tmp_path, "proc/sys/vm/overcommit_memory", "0\n")
    return tmp_path


def check(root: Path, gib: float | str = "auto") -> dict[str, Finding]:
    return {f.name: f for f in memory.check(Settings(cpu_gib=gib), root)}


def test_a_machine_without_limits(root: Path) -> None:
    found = check(root)
    assert found["to be had"].found == "20.0 GiB of 32.0 GiB"
    assert found["cgroup limit"].found == "none"
    assert found["tier"].value == 10 * GIB
    assert found["tier"].found.startswith("10.0 GiB: 1/2 of the 20.0 GiB that this machine can")
    assert not any(f.problem for f in found.values())


def test_the_cgroup_that_has_least_left_decides(root: Path) -> None:
    write(root, "proc/self/mountinfo", MOUNT)
    write(root, "proc/self/cgroup", "0::/a/b\n")
    for name, limit, used in (("a", 8, 1), ("a/b", 12, 8)):
        write(root, f"sys/fs/cgroup/{name}/memory.max", limit * GIB)
        write(root, f"sys/fs/cgroup/{name}/memory.current", used * GIB)
    found = check(root)
    assert found["cgroup limit"].found == "12.0 GiB for cgroup /a/b, 4.0 GiB of it left"
    assert found["tier"].value == 2 * GIB and "cgroup /a/b can give" in found["tier"].found


@pytest.mark.parametrize(("gib", "refused"), [(19.0, False), (19.1, True)])
def test_a_size_that_was_asked_for_fits_or_is_refused(
    root: Path, gib: float, refused: bool
) -> None:
    tier = check(root, gib)["tier"]
    assert tier.found == f"{gib:.1f} GiB, as asked for"
    assert tier.refused is refused
    assert ("lower KVOFFLOAD_CPU_GIB" in tier.problem) is refused


def test_a_machine_with_nothing_left(root: Path) -> None:
    write(root, "proc/meminfo", "MemTotal: 99999999 kB\nMemAvailable: 1000000 kB\n")
    tier = check(root)["tier"]
    assert tier.value == 0 and tier.refused and "1 GiB stay free" in tier.problem


def test_a_kernel_that_does_not_overcommit_is_a_problem(root: Path) -> None:
    write(root, "proc/sys/vm/overcommit_memory", "2\n")
    found = check(root)["overcommit"]
    assert found.found == "never" and "vm.overcommit_memory=0" in found.sentence
    (root / "proc/sys/vm/overcommit_memory").unlink()
    assert check(root)["overcommit"].found == "unknown"
