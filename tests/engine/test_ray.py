"""vLLM's Ray executor: the settings reach workers that Ray has started, on one node and on two.

`scripts/matrix features` installs Ray in a folder of its own.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from engine import engines, nodes
from engine import plain as vllm
from engine.ray_node import RayNode
from engine.report import assert_same
from engine.shared_memory import files_left

from scripts.soak import watch

pytestmark = pytest.mark.features
PLAYED = ["setup", "conversations"]
RAY = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
MODE = {"KVOFFLOAD_LOAD_MODE": "parked"}


@pytest.fixture(scope="module")
def node(real):
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed; scripts/matrix features installs it")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, RayNode(Path(folder)) as started:
        _must_play(real, started.environment)
        yield started


def _must_play(real, environment: dict[str, str]) -> None:
    if vllm.may_fail():
        vllm.must_play(real.off(["setup"], RAY, **environment))


@contextmanager
def two_nodes() -> Iterator[tuple[dict[str, str], int]]:
    """Two of one device each: what an engine's environment needs, and the second one's process."""
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        RayNode(Path(folder), 1) as first,
        RayNode(Path(folder), 1, first) as second,
    ):
        yield first.environment, second.pid


@pytest.fixture
def hosts(node):
    if nodes.why_no_host():
        pytest.skip(nodes.why_no_host())


def test_ray_workers_get_the_settings(real, node):
    _answers_the_same(real, node.environment)


def _answers_the_same(real, environment: dict[str, str]) -> engines.Run:
    off = real.off(PLAYED, {"tensor_parallel_size": 2}, TEST_FORK_WORKERS="1")
    on = real.on(PLAYED, RAY, MODE, **environment)
    assert on["setup"]["executor"].startswith("Ray"), "no worker was started by Ray"
    assert_same(on["conversations"], off["conversations"])
    assert off["conversations"]["cached"] == 0
    assert on["conversations"]["tier"]["loaded"] > 0.9 * engines.evicted_tokens() // 128
    return on


def test_a_ray_worker_without_the_tier_is_refused(real, node):
    """It arms by vLLM's plugin entry point, which the user may have left out."""
    run = real.on(["setup"], RAY, MODE, VLLM_PLUGINS="none", **node.environment)
    assert run.returncode != 0 and "cannot take part: expected execute_model of" in run.log


@pytest.mark.usefixtures("hosts")
def test_a_rank_on_another_node_gets_the_settings(real):
    with two_nodes() as (environment, _):
        _must_play(real, environment)
        _answers_the_same(real, environment)


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("when", ["node_lost", "node_lost_at_work"])
def test_a_node_that_is_lost_ends_the_engine_as_without_the_tier(real, record_property, when):
    vllm.only_here("a lost node")
    ends, before = [], watch.files_left()
    for tier in (None, MODE):
        with two_nodes() as (environment, pid):
            play = real.off if tier is None else partial(real.on, tier=tier)
            ends.append(play([when], RAY, TEST_LOSE=str(pid), **environment)[when])
    nodes.assert_end_alike(record_property, ends, executor="Ray", when=when)
    assert not files_left(before)
