"""The tier over kvcached's own Python code and vLLM 0.26.0's, both from their sources.

KVCACHED_SOURCES names the folder of kvcached's source archive, unpacked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.release.sources import NotFetched, fetch

PROGRAM = Path(__file__).parent / "elastic.py"
RELEASE = "0.26.0"


@pytest.mark.releases
@pytest.mark.skipif("KVCACHED_SOURCES" not in os.environ, reason="KVCACHED_SOURCES is not set")
def test_no_copy_outlives_the_memory_of_its_blocks() -> None:
    try:
        sources = fetch(RELEASE)
    except NotFetched as why:
        pytest.skip(str(why))
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVOFFLOAD_")}
    command = [sys.executable, str(PROGRAM), f"{RELEASE}={sources}", env["KVCACHED_SOURCES"]]
    done = subprocess.run(command, env=env, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["conversations"]["unmaps"] > 0
