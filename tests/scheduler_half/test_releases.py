"""The scheduler half on every supported release, from its sources: no release is installed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import pytest
from packaging.version import Version

from kvoffload_patch.integration.patch_table.verified import RELEASES
from scripts.matrix.scheduler import failed, play
from scripts.release.sources import NotFetched

pytestmark = [
    pytest.mark.releases,
    pytest.mark.skipif(not find_spec("vllm"), reason="what vLLM depends on is not installed"),
]

# The first release that has what a scenario is about; the others are about what all have.
SINCE = {
    "asynchronous": "0.10.2",  # there from 0.10.0 on, and refused before this
    "priorities": "0.9.2",
    "reset with running requests": "0.12.0",
    "invalid blocks": "0.11.1",
    "trap: zeroed blocks": "0.17.1",
    "trap: block copies": "0.26.0",
}


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Future[Any]]]:
    """Starts the releases that were asked for, as many at once as there are CPUs."""
    items = [item for item in request.session.items if item.module is request.module]
    releases = [item.callspec.params["release"] for item in items if hasattr(item, "callspec")]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = {release: pool.submit(play, release) for release in releases}
        yield futures.__getitem__
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("release", RELEASES)
def test_scheduler_half(started: Callable[[str], Future[Any]], release: str) -> None:
    try:
        result = started(release).result()
    except NotFetched as reason:
        pytest.skip(str(reason))
    scenarios = result["scenarios"]
    assert failed(scenarios) == {}
    absent = {name for name, one in scenarios.items() if one["outcome"] == "absent"}
    assert absent == {n for n, first in SINCE.items() if Version(release) < Version(first)}
    assert len(scenarios) > 25 and result["verdict"] == "green"
