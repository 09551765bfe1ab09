"""`matrix random`, for a moment: over a release's sources, where connectors are stand-ins."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
from packaging.version import Version

from kvoffload_patch.integration.patch_table.verified import RELEASES
from scripts import ROOT
from scripts.release.sources import NotFetched, fetch

NEWEST = max(RELEASES, key=Version)

pytestmark = [
    pytest.mark.releases,
    pytest.mark.skipif(not find_spec("vllm"), reason="what vLLM depends on is not installed"),
]


@pytest.mark.parametrize("shape", ["connector", "connector+state"])
def test_a_release_runs_beside_a_connector(shape: str) -> None:
    """A stand-in says yes to whatever vLLM asks: the connector of the runs answers all of it."""
    try:
        fetch(NEWEST)
    except NotFetched as reason:
        pytest.skip(str(reason))
    command = [sys.executable, str(ROOT / "scripts/matrix"), "random", NEWEST, "--shape", shape]
    done = subprocess.run(
        [*command, "--seconds", "1", "--seed", "20"], text=True, capture_output=True, check=False
    )
    told = json.loads(done.stdout)
    assert told["failed"] == {} and done.returncode == 0
    assert told["release"] == NEWEST and told["seen"]["connector loads"] > 0
    assert told["seen"]["states"] > 0 or shape == "connector"
