"""Memory still available, read from made-up kernel files, and the refusal that follows."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cgroups import limited

from kvoffload_patch.config import GIB, ConfigError
from kvoffload_patch.memory import (
    MemoryRefused,
    Room,
    attainable,
    auto_bytes,
    available,
    check_capacity,
    check_cpu_bytes,
    locked_memory_limit_bytes,
    raise_locked_memory_limit,
    shareable,
)

V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
V1_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
"""
UNLIMITED_V1 = 9223372036854771712


class Machine:
    """A root folder that looks like one machine's /proc and /sys."""

    def __init__(self, root: Path, available_gib: float | None = 16) -> None:
        self.root = root
        if available_gib is not None:
            kib = int(available_gib * GIB) // 1024
            self.write("proc/meminfo", f"MemTotal: 99999999 kB\nMemAvailable:   {kib} kB\n")

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}")

    def cgroup2(self, path: str, limit: object, used: float = 0, cache: float = 0) -> None:
        folder = f"sys/fs/cgroup/{path}"
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.current", f"{int(used * GIB)}\n")
        stat = f"anon 1\ninactive_file {int(cache * GIB)}\n"
        self.write(f"{folder}/memory.stat", stat)

    def cgroup1(self, path: str, limit: int, used: float = 0, cache: float = 0) -> None:
        folder = f"sys/fs/cgroup/memory/{path}"
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{int(used * GIB)}\n")
        stat = f"inactive_file 7\ntotal_inactive_file {int(cache * GIB)}\n"
        self.write(f"{folder}/memory.stat", stat)

    def virtual(self, total_gib: int, blocks: int, *devices: int) -> None:
        """A virtual machine with ``blocks`` blocks of 1 GiB and these virtio devices."""
        kib = 1 << 20
        self.write("proc/meminfo", f"MemTotal: {total_gib * kib} kB\nMemAvailable: {6 * kib} kB\n")
        self.write("sys/devices/system/memory/block_size_bytes", "40000000\n")
        for i in range(blocks):
            self.write(f"sys/devices/system/memory/memory{i}/state", "online\n")
        for i, device in enumerate(devices):
            self.write(f"sys/bus/virtio/devices/virtio{i}/device", f"0x{device:04x}\n")

    def gib(self) -> float:
        return available(self.root).nbytes / GIB


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_machine_without_limits(machine: Machine) -> None:
    assert machine.gib() == 16


def test_the_address_space_of_a_process_may_be_limited(machine: Machine) -> None:
    page = resource.getpagesize()
    machine.write("proc/self/statm", f"{GIB // page} 5 5 1 0 2 0\n")
    limits = "Limit  Soft Limit  Hard Limit  Units\nMax address space  {}  unlimited  bytes\n"
    machine.write("proc/self/limits", limits.format(9 * GIB))
    assert available(machine.root) == Room(8 * GIB, "the address space of a process (ulimit -v)")
    with pytest.raises(MemoryRefused, match=r"8\.0 GiB .* only 7\.0 GiB fit: .*ulimit -v"):
        check_cpu_bytes(8 * GIB, machine.root)
    with pytest.raises(MemoryRefused, match=r"\(ulimit -v\) has 9\.0 GiB of memory in all"):
        check_capacity(10 * GIB, machine.root)
    machine.write("proc/self/limits", limits.format("unlimited"))
    assert machine.gib() == 16


def test_cgroup2_own_limit_minus_what_is_used(machine: Machine) -> None:
    machine.write("proc/self/mountinfo", V2_MOUNT.format(root="/"))
    machine.write("proc/self/cgroup", "0::/a/b\n")
    machine.cgroup2("a/b", 8 * GIB, used=3)
    assert machine.gib() == 5
    machine.cgroup2("a/b", "max", used=3)
    assert machine.gib() == 16


def test_cgroup2_every_level_counts(machine: Machine) -> None:
    machine.write("proc/self/mountinfo", V2_MOUNT.format(root="/"))
    machine.write("proc/self/cgroup", "0::/a/b\n")
    machine.cgroup2("a/b", 8 * GIB)
    machine.cgroup2("a", 6 * GIB, used=4)
    assert machine.gib() == 2
    machine.cgroup2("", 5 * GIB, used=4)
    assert machine.gib() == 1
    machine.cgroup2("other", 1)  # not above this process
    assert machine.gib() == 1


def test_page_cache_that_can_be_dropped_is_available(machine: Machine) -> None:
    machine.write("proc/self/mountinfo", V2_MOUNT.format(root="/"))
    machine.write("proc/self/cgroup", "0::/a\n")
    machine.cgroup2("a", 8 * GIB, used=7, cache=5)
    assert machine.gib() == 6


def test_container_sees_its_cgroup_at_the_mount(machine: Machine) -> None:
    machine.write("proc/self/mountinfo", V2_MOUNT.format(root="/"))
    machine.write("proc/self/cgroup", "0::/../../outside\n")
    machine.cgroup2("", 4 * GIB, used=1)
    assert machine.gib() == 3


@pytest.mark.parametrize("path", ["/docker/c1/job", "/elsewhere"])
def test_cgroup1_with_a_root_within_the_mount(machine: Machine, path: str) -> None:
    machine.write("proc/self/mountinfo", V1_MOUNTS.format(root="/docker/c1"))
    machine.write("proc/self/cgroup", f"5:cpu:/x\n4:memory:{path}\n0::/wrong\n")
    machine.cgroup1("", 6 * GIB, used=4, cache=1)
    assert machine.gib() == 3
    machine.cgroup1("job", 2 * GIB, used=1)
    assert machine.gib() == (1 if path.endswith("job") else 3)


def test_cgroup1_without_limit(machine: Machine) -> None:
    machine.write("proc/self/mountinfo", V1_MOUNTS.format(root="/"))
    machine.write("proc/self/cgroup", "4:memory:/\n")
    machine.cgroup1("", UNLIMITED_V1, used=4)
    assert machine.gib() == 16


def test_both_versions_mounted(machine: Machine) -> None:
    mounts = V1_MOUNTS.format(root="/") + V2_MOUNT.format(root="/").replace(
        "/sys/fs/cgroup", "/sys/fs/cgroup/unified"
    )
    machine.write("proc/self/mountinfo", mounts)
    machine.write("proc/self/cgroup", "4:memory:/v1\n0::/v2\n")
    machine.cgroup1("v1", 3 * GIB)
    assert machine.gib() == 3
    machine.cgroup2("unified/v2", 2 * GIB)
    assert machine.gib() == 2


def test_overused_cgroup_has_nothing_left(machine: Machine) -> None:
    machine.write("proc/self/mountinfo", V2_MOUNT.format(root="/"))
    machine.write("proc/self/cgroup", "0::/\n")
    machine.cgroup2("", 2 * GIB, used=3)
    assert machine.gib() == 0


def test_odd_lines_are_skipped(machine: Machine) -> None:
    machine.write("proc/self/mountinfo", "\nnonsense\n1 2 3 - x\n" + V2_MOUNT.format(root="/"))
    machine.write("proc/self/cgroup", "0::/a:b\n")
    machine.cgroup2("a:b", 1 * GIB)
    assert machine.gib() == 1


def test_nothing_known_is_not_refused(tmp_path: Path) -> None:
    Machine(tmp_path, available_gib=None)
    assert available(tmp_path).nbytes == sys.maxsize
    check_cpu_bytes(1 << 60, tmp_path)


def test_refusal_names_asked_available_and_remedy(machine: Machine) -> None:
    check_cpu_bytes(15 * GIB, machine.root)
    with pytest.raises(MemoryRefused) as caught:
        check_cpu_bytes(15 * GIB + 1, machine.root)
    with pytest.raises(ConfigError, match=r"of 64\.0 GiB was asked.*only 15\.0 GiB.*KVOFFLOAD_CPU"):
        check_cpu_bytes(64 * GIB, machine.root)
    assert "\n" not in str(caught.value)


def test_what_can_never_fit_is_refused_whatever_is_used_now(machine: Machine) -> None:
    machine.virtual(31, 31)
    check_capacity(30 * GIB, machine.root)
    with pytest.raises(MemoryRefused, match=r"only 30\.0 GiB fit: this machine has 31\.0 GiB"):
        check_capacity(30 * GIB + 1, machine.root)
    machine.write("proc/self/mountinfo", V2_MOUNT.format(root="/"))
    machine.write("proc/self/cgroup", "0::/a/b\n")
    machine.cgroup2("a", 8 * GIB, used=7)
    check_capacity(7 * GIB, machine.root)
    with pytest.raises(MemoryRefused, match=r"only 7\.0 GiB fit: cgroup /a has 8\.0 GiB"):
        check_capacity(7 * GIB + 1, machine.root)
    machine.cgroup2("", 4 * GIB, used=1)
    with pytest.raises(MemoryRefused, match=r"only 3\.0 GiB fit: cgroup / has 4\.0 GiB"):
        check_capacity(5 * GIB, machine.root)


@pytest.mark.parametrize(("gives", "takes"), [(0, 0), (1, 0), (1.5, 0.5), (2, 1), (20, 10)])
def test_an_automatic_tier_takes_half_and_leaves_a_reserve(gives: float, takes: float) -> None:
    assert auto_bytes(int(gives * GIB)) == takes * GIB


def test_an_automatic_tier_where_nothing_is_left_is_refused(machine: Machine) -> None:
    check_cpu_bytes(None, machine.root)
    machine.write("proc/meminfo", f"MemAvailable: {1 << 20} kB\n")
    with pytest.raises(MemoryRefused, match=r"of auto was asked for, but only 0\.0 GiB fit"):
        check_cpu_bytes(None, machine.root)
    (machine.root / "proc/meminfo").unlink()
    with pytest.raises(MemoryRefused, match="a system without /proc/meminfo has 0.0 GiB"):
        check_cpu_bytes(None, machine.root)
    check_capacity(None, machine.root)


def test_an_automatic_tier_shares_what_is_there_where_more_has_no_end(machine: Machine) -> None:
    machine.virtual(31, 32, 24)
    assert shareable(machine.root) == Room(6 * GIB)
    machine.virtual(8, 32, 5)
    (machine.root / "sys/bus/virtio/devices/virtio0/device").write_text("0x0005")
    assert shareable(machine.root) == Room(30 * GIB)


def test_a_cgroup_without_a_limit_is_no_limit(machine: Machine) -> None:
    machine.virtual(31, 32, 24)
    machine.write("proc/self/mountinfo", V1_MOUNTS.format(root="/"))
    machine.write("proc/self/cgroup", "4:memory:/\n")
    machine.cgroup1("", UNLIMITED_V1, used=4)
    assert attainable(machine.root).nbytes == sys.maxsize
    assert shareable(machine.root) == Room(6 * GIB)


def test_what_a_balloon_holds_may_come_and_is_not_there_yet(machine: Machine) -> None:
    machine.virtual(8, 32, 2, 5)
    assert machine.gib() == 6
    assert attainable(machine.root).nbytes == 30 * GIB
    check_cpu_bytes(29 * GIB, machine.root)
    with pytest.raises(MemoryRefused, match=r"31\.0 GiB was asked.*only 29\.0 GiB"):
        check_cpu_bytes(31 * GIB, machine.root)


def test_without_a_balloon_memory_that_the_kernel_lacks_does_not_come(machine: Machine) -> None:
    machine.virtual(8, 32, 1, 2, 4)
    assert attainable(machine.root).nbytes == 6 * GIB


def test_a_balloon_on_a_machine_that_does_not_count_its_blocks(machine: Machine) -> None:
    machine.virtual(8, 0, 5)
    assert attainable(machine.root).nbytes == 6 * GIB
    (machine.root / "sys/devices/system/memory/block_size_bytes").unlink()
    assert attainable(machine.root).nbytes == 6 * GIB


def test_memory_that_can_be_plugged_in_has_no_known_end(machine: Machine) -> None:
    machine.virtual(31, 32, 2, 24)
    assert machine.gib() == 6
    assert attainable(machine.root).nbytes == sys.maxsize
    check_cpu_bytes(100 * GIB, machine.root)


def test_a_cgroup_limits_what_may_come(machine: Machine) -> None:
    machine.virtual(31, 32, 24)
    machine.write("proc/self/mountinfo", V2_MOUNT.format(root="/"))
    machine.write("proc/self/cgroup", "0::/\n")
    machine.cgroup2("", 128 * GIB, used=3)
    assert attainable(machine.root).nbytes == 125 * GIB
    assert machine.gib() == 6


def test_the_limit_on_locked_memory_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 1 << 30))
    assert locked_memory_limit_bytes() == 8 << 20
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda which: unlimited)
    assert locked_memory_limit_bytes() == sys.maxsize


def test_the_limit_on_locked_memory_is_raised_as_far_as_allowed() -> None:
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    half = (before[1] if before[1] != resource.RLIM_INFINITY else 1 << 30) // 2
    try:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (half, before[1]))
        assert locked_memory_limit_bytes() == half
        raise_locked_memory_limit()
        assert resource.getrlimit(resource.RLIMIT_MEMLOCK) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


def test_a_system_that_does_not_let_the_limit_be_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    raise_locked_memory_limit()


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="needs Linux")
def test_this_machine() -> None:
    assert 1 << 20 < available().nbytes < 1 << 50
    assert attainable().nbytes >= available().nbytes - (64 << 20)


# A shell that joins a cgroup, and a Python in its place that says what it may take, and whether a
# tier of 8 GiB fits.
IN_CGROUP = """
echo $$ > "$0/cgroup.procs"
exec "$1" -c "
from kvoffload_patch.memory import MemoryRefused, available, check_cpu_bytes
print(available().nbytes, available().of, sep='|')
try:
    check_cpu_bytes(8 << 30)
except MemoryRefused as refusal:
    print(refusal)
"
"""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A real one of this machine with a limit of 1 GiB."""
    with limited(GIB) as folder:
        yield folder


def test_a_real_cgroup_limits_what_is_taken(cgroup: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", IN_CGROUP, str(cgroup), sys.executable],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, refusal = done.stdout.splitlines()
    nbytes, _, of = first.partition("|")
    assert GIB // 2 < int(nbytes) <= GIB and "cgroup" in of
    assert "8.0 GiB" in refusal and "cgroup" in refusal
