"""What the machine does to an engine: its clock is set, its cgroup is tight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from cgroups import limited
from engine import engines
from engine.report import assert_same

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
