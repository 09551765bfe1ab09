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

pytestmark = [
    pytest.mark.releases,
    pytest.mark.skipif("KVCACHED_SOURCES" not in os.environ, reason="KVCACHED_SOURCES is not set"),
]
PROGRAM = Path(__file__).parent / "elastic.py"
RELEASE = "0.26.0"
# kvcached's start-up file waits for vLLM, whichever is installed, as ours does.
IMPORT = """\
import os, site, sys, types
from scheduler_half import vmm_ops
sys.modules.update({"kvcached.vmm_ops": vmm_ops, "posix_ipc": types.ModuleType("posix_ipc")})
site.addsitedir(os.environ["KVCACHED_SOURCES"])
from vllm.v1.core import block_pool
from vllm.v1.engine.core import EngineCore
assert hasattr(block_pool, "ElasticBlockPool")
assert EngineCore.__init__.__module__ == "kvcached.integration.vllm.patches"
import kvoffload_patch
"""


def play(command: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    """A program of its own, without the caller's settings of the tier."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVOFFLOAD_")}
    paths = [str(PROGRAM.parents[2]), str(PROGRAM.parents[1]), env.get("PYTHONPATH", "")]
    env |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), **more}
    return subprocess.run(command, env=env, text=True, capture_output=True, check=False)


def test_no_copy_outlives_the_memory_of_its_blocks() -> None:
    try:
        sources = fetch(RELEASE)
    except NotFetched as why:
        pytest.skip(str(why))
    folder = os.environ["KVCACHED_SOURCES"]
    done = play([sys.executable, str(PROGRAM), f"{RELEASE}={sources}", folder])
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["conversations"]["unmaps"] > 0
    assert set(seen["geometry"].values()) == {1, 6}, "rows: of all layers, or K and V of each"


def test_the_tiers_hooks_come_before_kvcacheds() -> None:
    pytest.importorskip("vllm")
    program = IMPORT + "assert kvoffload_patch.status()['armed']\nprint('armed')"
    command = [sys.executable, "-m", "kvoffload_patch", sys.executable, "-c", program]
    done = play(command, ENABLE_KVCACHED="true", KVOFFLOAD_CPU_GIB="0.1")
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["armed"]), done.stderr[-3000:]


def test_kvcacheds_before_the_tiers_are_refused() -> None:
    pytest.importorskip("vllm")
    program = IMPORT + "kvoffload_patch.enable()"
    done = play([sys.executable, "-c", program], ENABLE_KVCACHED="true", KVOFFLOAD_CPU_GIB="0.1")
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert "engine.init" in said and "it is now kvcached.integration.vllm.patches" in said
    assert "Nothing was patched; set KVOFFLOAD_STRICT=0" in said
