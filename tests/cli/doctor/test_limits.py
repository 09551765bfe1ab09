"""What this process may lock, map and share, from faked limits."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvoffload_patch.cli.doctor import limits
from kvoffload_patch.cli.doctor.findings import Finding

GIB = 1 << 30
UNLIMITED = resource.RLIM_INFINITY


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    one = SimpleNamespace(locked=UNLIMITED, mapped=UNLIMITED, size=8 * GIB, free=GIB, root=tmp_path)
    (tmp_path / "dev/shm").mkdir(parents=True)

    def getrlimit(which: int) -> tuple[int, int]:
        limit = one.locked if which == resource.RLIMIT_MEMLOCK else one.mapped
        return limit, limit

    def statvfs(path: object) -> SimpleNamespace:
        if not os.path.isdir(str(path)):
            raise FileNotFoundError(path)
        return SimpleNamespace(f_frsize=1, f_blocks=one.size, f_bavail=one.free)

    monkeypatch.setattr(resource, "getrlimit", getrlimit)
    monkeypatch.setattr(os, "statvfs", statvfs)
    return one


def check(system: SimpleNamespace, gpu: bool = True, looks: bool = True) -> dict[str, Finding]:
    """With a GPU or vLLM's CPU build, which looks for room in shared memory before it starts."""
    source = system.root / "shm_broadcast.py"
    source.write_text("check_shm_free_space(self.total_bytes)" if looks else "")
    found = limits.check(4 * GIB, gpu, not gpu, system.root, lambda module: source)
    return {f.name: f for f in found}


def test_a_system_without_limits(system: SimpleNamespace) -> None:
    found = check(system)
    assert found["locked memory"].found == "unlimited"
    assert found["/dev/shm"].found == "1.0 GiB of 8.0 GiB free"
    assert not any(f.problem for f in found.values())


@pytest.mark.parametrize(
    ("locked", "gpu", "said"), [(8 << 20, True, True), (8 << 20, False, False), (4 * GIB, True, 0)]
)
def test_locked_memory_matters_where_a_driver_may_count_it(
    system: SimpleNamespace, locked: int, gpu: bool, said: bool
) -> None:
    system.locked = locked
    found = check(system, gpu)["locked memory"]
    assert bool(found.problem) is bool(said) and not found.refused
    assert ("ulimit -l" in found.sentence) is bool(said)


def test_address_space_for_less_than_two_tiers_is_a_problem(system: SimpleNamespace) -> None:
    system.mapped = 8 * GIB
    assert check(system)["address space"].problem == ""
    system.mapped -= 1
    assert "ulimit -v" in check(system)["address space"].sentence


def test_shared_memory_that_is_small_full_or_missing_is_a_problem(system: SimpleNamespace) -> None:
    for system.size, system.free in ((64 << 20, 64 << 20), (8 * GIB, (256 << 20) - 1)):
        said = check(system)["/dev/shm"].sentence
        assert "too little for an engine of several ranks, or on the CPU," in said
        assert "vLLM needs about 256 MiB there" in said and "--shm-size" in said
    system.size, system.free = GIB, 0
    assert "cannot be written to" in check(system)["/dev/shm"].problem
    (system.root / "dev/shm").rmdir()
    assert "cannot be written to" in check(system)["/dev/shm"].problem


def test_too_little_shared_memory_is_refused_where_vllm_does_not_start(
    system: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU every server shares some; with a GPU an engine of one rank shares none."""
    system.free = (256 << 20) - 1
    assert check(system, gpu=False)["/dev/shm"].refused
    assert not check(system, gpu=False, looks=False)["/dev/shm"].refused, "releases up to 0.26"
    assert not check(system, gpu=True)["/dev/shm"].refused
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    small = check(system, gpu=False)["/dev/shm"]
    assert small.problem and not small.refused, "an engine in its user's own process starts"
    system.free = 0
    assert check(system, gpu=False, looks=False)["/dev/shm"].refused, "not even a lock can be made"
    assert not check(system, gpu=True)["/dev/shm"].refused
