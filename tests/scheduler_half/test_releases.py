"""The scheduler half on supported releases, from their sources: no release is installed.

The first one, the newest, and the last patch of every ninth minor release between them, for the
time that a build has; TEST_RELEASES=all: every one, as `python scripts/matrix scheduler` plays
them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from packaging.version import Version

from kvoffload_patch.integration.patch_table.verified import RELEASES
from scripts.matrix.scheduler import failed, play_all

pytestmark = [
    pytest.mark.releases,
    pytest.mark.skipif(not find_spec("vllm"), reason="what vLLM depends on is not installed"),
]

LAST_PATCHES = list(
    {Version(one).release[:2]: one for one in sorted(RELEASES, key=Version)}.values()
)
EVERY = os.environ.get("TEST_RELEASES") == "all"
SOME = {min(RELEASES, key=Version), *LAST_PATCHES[8::9], LAST_PATCHES[-1]}
PLAYED = [one for one in RELEASES if EVERY or one in SOME]

# The first release that has what a scenario is about; the others are about what all have.
SINCE = {
    "asynchronous": "0.10.2",  # there from 0.10.0 on, and refused before this
    "priorities": "0.9.2",
    "priorities while loads wait for the bus": "0.9.2",
    "reset with running requests": "0.12.0",
    "trap: metrics of residency": "0.12.0",
    "invalid blocks": "0.11.1",
    "a prompt of a session": "0.15.0",
    "keys of a session": "0.15.0",
    "trap: zeroed blocks": "0.17.1",
    "trap: block copies": "0.26.0",
    "experts of each token": "0.33.0",
    "keys with the next tokens": "0.33.0",
}


@pytest.fixture(scope="module")
def outcome_of(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Any]]:
    """What came out of a release, and why nothing did; all asked for run, some at a time."""
    items = [item for item in request.session.items if item.module is request.module]
    releases = [item.callspec.params["release"] for item in items if hasattr(item, "callspec")]
    playing = play_all(releases, os.cpu_count() or 1)
    found: dict[str, tuple[Any, str]] = {}

    def wait_for(release: str) -> tuple[Any, str]:
        while release not in found:
            name, result, why = next(playing)
            found[name] = result, why
        return found[release]

    yield wait_for
    playing.close()


@pytest.mark.parametrize("release", PLAYED)
def test_scheduler_half(outcome_of: Callable[[str], Any], release: str) -> None:
    result, why = outcome_of(release)
    if result is None:
        pytest.skip(why)
    scenarios = result["scenarios"]
    assert failed(scenarios) == {}
    absent = {name for name, one in scenarios.items() if one["outcome"] == "absent"}
    assert absent == {n for n, first in SINCE.items() if Version(release) < Version(first)}
    assert len(scenarios) > 25 and result["verdict"] == "green"
