"""Kinds of engines on two nodes of Ray: what they are played with, and what must hold of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine import engines, gpu_answers, gpu_kinds, gpu_nodes

KINDS = {kind.name: kind for kind in gpu_kinds.KINDS if kind.ray}
TWO_RANKS = KINDS["by Ray, two ranks on two nodes"]
LOST = KINDS["by Ray, two stages, a node lost while it answers"]


class Node:
    """Takes what a node is made with, and tells when it starts and ends."""

    told: list[Any] = []

    def __init__(self, folder: Path, devices: int, first: Any, how: tuple[dict, Path]) -> None:
        self.first, self.environment, self.pid = first, {"RAY_ADDRESS": "a", **how[0]}, 7
        about = (how[1] / "kvoffload_patch-0.dist-info/entry_points.txt").read_text()
        self.told.append((devices, first, how[0]["CUDA_VISIBLE_DEVICES"], about))

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.told.append("first ends" if self.first is None else "second ends")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(gpu_nodes, "RayNode", Node)
    monkeypatch.setattr(Node, "told", [])
    return Node.told


def test_each_node_has_a_gpu_and_the_engine_sees_both(told: list[Any]) -> None:
    asked = {"VLLM_USE_V2_MODEL_RUNNER": "1", "CUDA_VISIBLE_DEVICES": "4,6"}
    with gpu_nodes.started("4,6", asked, "singles") as environment:
        (*first, points), (devices, joined, gpu, _) = told
    assert first == [1, None, "4"] and (devices, gpu) == (1, "6") and joined is not None
    assert "vllm.general_plugins" in points, "a worker that Ray starts would not arm"
    assert told[2:] == ["second ends", "first ends"]
    assert environment["CUDA_VISIBLE_DEVICES"] == "4,6"
    assert environment["RAY_ADDRESS"] == "a" and environment["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert environment["NCCL_SOCKET_IFNAME"] == "lo" and "TEST_LOSE" not in environment


def test_an_engine_that_is_to_lose_a_node_is_told_which_and_waits_a_minute_at_most(
    told: list[Any],
) -> None:
    with gpu_nodes.started("0,1", {}, "node_lost") as environment:
        assert environment["TEST_LOSE"] == "7"
        assert environment["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] == "60"


def test_engines_that_start_at_the_same_time_look_for_ports_in_different_places(
    told: list[Any],
) -> None:
    ports = set()
    for _ in range(2):
        with gpu_nodes.started("0,1", {}, "singles") as environment:
            ports.add(environment["VLLM_DP_MASTER_PORT"])
    assert len(ports) == 2


def test_the_engine_is_played_between_the_nodes_start_and_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[Any] = []

    @contextmanager
    def started(gpus: str, asked: dict[str, str], scenario: str) -> Iterator[dict[str, str]]:
        said.append((gpus, scenario))
        yield {**asked, "RAY_ADDRESS": "a"}
        said.append("ended")

    def run(scenarios: list[str], engine: dict, *_: Any, **asked: str) -> Any:
        said.append((scenarios, engine["distributed_executor_backend"], asked["RAY_ADDRESS"]))
        return SimpleNamespace(results={}, log="")

    monkeypatch.setattr(gpu_kinds.gpu_nodes, "started", started)
    monkeypatch.setattr(gpu_kinds.engines, "run", run)
    gpu_kinds.play(Path("/models"), "0,1", "v1", LOST, True, True)
    when = "node_lost_at_work"
    assert said == [("0,1", when), (["setup", when], "ray", "a"), "ended"]


def test_a_node_that_does_not_start_is_a_kind_that_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @contextmanager
    def started(*_: object) -> Iterator[None]:
        raise TimeoutError("Ray is not up")
        yield

    monkeypatch.setattr(gpu_kinds.gpu_nodes, "started", started)
    played = gpu_kinds.play(Path("/models"), "0,1", "v1", TWO_RANKS, True, True)
    assert played == {"error": "Ray is not up"}


def test_kinds_by_ray_are_left_out_where_it_is_not_importable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_nodes, "why_not", lambda: "Ray is not importable")
    assert gpu_kinds.chosen(["v1", "v2"], ["by Ray"], 2) == []
    monkeypatch.setattr(gpu_nodes, "why_not", lambda: "")
    played = [kind.name for _, kind in gpu_kinds.chosen(["v1", "v2"], ["by Ray"], 2)]
    assert played == [*KINDS, *KINDS] and gpu_kinds.chosen(["v1"], ["by Ray"], 1) == []


def ended(slots: int, **changes: Any) -> dict[str, Any]:
    """An engine that has lost a node, as it is to be."""
    end = {"error": "RuntimeError", "said": "a rank is gone", "seconds": 1.0}
    setup = {"runner": "r", "scheduler": "s", "executor": "RayExecutorV2", "slots": slots}
    kept = {name: changes.pop(name) for name in list(changes) if name in setup}
    return {"setup": {**setup, **kept}, LOST.asked: {**end, **changes}, "one_copy": ""}


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, "passed"),
        ({"seconds": 30.0}, "passed"),
        ({"seconds": 40.0}, "failed"),
        ({"error": "TimeoutError"}, "failed"),
        ({"error": ""}, "failed"),
        ({"said": "kvoffload_patch: expected"}, "failed"),
        ({"executor": "MultiprocExecutor"}, "failed"),
        ({"slots": 0}, "failed"),
    ],
)
def test_an_engine_that_has_lost_a_node_ends_as_plain_vllm(changes: dict, outcome: str) -> None:
    found = gpu_answers.compare("v1", LOST, ended(0), ended(**{"slots": 5, **changes}))
    assert (found["outcome"], found["answers"]) == (outcome, 0)
    assert (found["lost"]["executor"], found["lost"]["when"]) == ("Ray, two stages", LOST.asked)
    assert found["lost"]["plain"]["seconds"] == 1.0


def test_an_engine_that_answers_without_its_node_has_failed() -> None:
    both = ended(0, error=""), ended(5, error="")
    assert gpu_answers.compare("v1", LOST, *both)["outcome"] == "failed"


@pytest.mark.parametrize(
    ("executor", "outcome"), [("RayExecutorV2", "passed"), ("MultiprocExecutor", "failed")]
)
def test_ray_has_started_the_ranks_whose_answers_are_compared(executor: str, outcome: str) -> None:
    setup = {"runner": "r", "scheduler": "s", "groups": 1, "executor": executor}
    side = {"setup": setup, "one_copy": "", "sensitivity": {"tokens": [[n] for n in range(4)]}}
    side |= {name: {"tokens": [[1], [2]], "tier": {"loaded": 5}} for name in ("singles", "batches")}
    found = gpu_answers.compare("v1", TWO_RANKS, side, side)
    assert (found["outcome"], found["executor"]) == (outcome, executor)


def test_an_engines_log_is_kept_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TEST_LOGS", str(tmp_path))
    engines._keep("what it said", "plain-singles-")
    (kept,) = tmp_path.glob("plain-singles-*.log")
    assert kept.read_text() == "what it said"
