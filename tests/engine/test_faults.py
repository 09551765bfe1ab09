"""What the machine does to an engine: its clock is set, its cgroup is tight, /dev/shm is full."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from cgroups import limited
from engine import engines, release
from engine.report import assert_same
from engine.shared_memory import files_left

from scripts.soak import watch

MIB = 1 << 20
# An engine of the tests takes less with its libraries. With 1 GiB to stay free, its tier has some
# hundred MiB.
LIMIT_MIB = 3072


def test_a_clock_that_is_set_changes_nothing(real, plain):
    run = real.on(["conversations"], late=3, TEST_CLOCK="1")
    assert_same(run["conversations"], plain["conversations"])
    found = run["conversations"]["tier"]
    assert found["loaded"] > 0 and found["failed"] == 0
    assert "is detached" not in run.log


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A real one of this machine."""
    with limited(LIMIT_MIB * MIB) as folder:
        yield folder


def test_an_engine_in_a_tight_cgroup_takes_what_it_has_and_serves(real, plain, cgroup):
    """Its tier is sized by the cgroup; more is refused with its name before vLLM starts."""
    run = within(cgroup, real, {"KVOFFLOAD_CPU_GIB": "auto"})
    assert run.returncode == 0, run.log[-3000:]
    assert_same(run["conversations"], plain["conversations"])
    assert run["conversations"]["tier"]["loaded"] > 0
    assert "GiB over all ranks, chosen: " in run.log and "cgroup" in run.log
    assert killed(cgroup) == 0, "the kernel has ended a process of it"
    refused = within(cgroup, real, {"KVOFFLOAD_CPU_GIB": "4"})
    assert refused.returncode == 2 and not refused.results
    assert "cgroup" in refused.log and "lower KVOFFLOAD_CPU_GIB" in refused.log


def within(cgroup: Path, real, tier: dict[str, str]) -> engines.Run:
    """An engine, and all that starts it, in a cgroup."""
    joining = ["sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', str(cgroup)]
    arguments = {"model": real.model}
    return engines.run(["conversations"], arguments, tier, prefix=joining)


def killed(cgroup: Path) -> int:
    """Processes that the kernel has ended for want of memory."""
    for file in ("memory.oom_control", "memory.events"):
        with suppress(OSError):
            for line in (cgroup / file).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


FULL, UNWRITABLE = "size=1m", "ro"


def beside(shared: str, real, **engine: str) -> engines.Run:
    """An engine with the tier and a /dev/shm of its own; none of its files may be left."""
    if shutil.which("unshare") is None:
        pytest.skip("this system has no unshare")
    mounts = f"mount -t tmpfs -o {shared} tmpfs /dev/shm"
    if subprocess.run(["unshare", "--mount", "sh", "-c", mounts], capture_output=True).returncode:
        pytest.skip("this user may mount no /dev/shm of its own")
    before = watch.files_left()
    run = real.on(["conversations"], engine, TEST_SHM=shared, TEST_FORK_WORKERS="1")
    assert not files_left(before)
    return run


def test_a_full_shared_memory_changes_nothing_where_vllm_needs_none(real, plain):
    """The tier has its files elsewhere."""
    run = beside(FULL, real)
    assert run.returncode == 0, run.log[-3000:]
    assert_same(run["conversations"], plain["conversations"])
    assert run["conversations"]["tier"]["loaded"] > 0 and "is detached" not in run.log


def test_a_full_shared_memory_is_vllms_own_error_where_it_has_a_worker_apart(real):
    asks = "distributed/device_communicators/shm_broadcast.py"
    if "check_shm_free_space" not in release.source(asks):
        pytest.skip(f"vLLM {release.version()} does not look for room there")
    run = beside(FULL, real, distributed_executor_backend="mp")
    assert run.returncode == 1 and not run.results
    assert "Insufficient space in /dev/shm for shared-memory allocation" in run.log
    assert "KV offload" not in run.log, "the tier was opened"


def test_an_unwritable_shared_memory_is_vllms_own_error(real):
    if "Lock()" not in release.source("v1/executor/uniproc_executor.py"):
        pytest.skip(f"vLLM {release.version()} needs no lock for an engine of one rank")
    run = beside(UNWRITABLE, real)
    assert run.returncode == 1 and not run.results
    assert run.log.rstrip().endswith("Read-only file system"), run.log[-3000:]
    assert "KV offload" not in run.log, "the tier was opened"
