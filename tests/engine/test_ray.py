"""vLLM's Ray executor: the settings reach workers that Ray has started.

`scripts/matrix features` installs Ray in a folder of its own.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import pytest
from engine import engines
from engine import plain as vllm
from engine.ray_node import RayNode
from engine.report import assert_same

pytestmark = pytest.mark.features
PLAYED = ["setup", "conversations"]
RAY = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
MODE = {"KVOFFLOAD_LOAD_MODE": "parked"}


@pytest.fixture(scope="module")
def node(real):
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed; scripts/matrix features installs it")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, RayNode(Path(folder)) as started:
        if not vllm.is_default():
            vllm.must_play(real.off(["setup"], RAY, **started.environment))
        yield started


def test_ray_workers_get_the_settings(real, node):
    off = real.off(PLAYED, {"tensor_parallel_size": 2}, TEST_FORK_WORKERS="1")
    on = real.on(PLAYED, RAY, MODE, **node.environment)
    assert_same(on["conversations"], off["conversations"])
    assert off["conversations"]["cached"] == 0
    assert on["conversations"]["tier"]["loaded"] > 0.9 * engines.evicted_tokens() // 128


def test_a_ray_worker_without_the_tier_is_refused(real, node):
    """It arms by vLLM's plugin entry point, which the user may have left out."""
    run = real.on(["setup"], RAY, MODE, VLLM_PLUGINS="none", **node.environment)
    assert run.returncode != 0 and "cannot take part: expected execute_model of" in run.log
