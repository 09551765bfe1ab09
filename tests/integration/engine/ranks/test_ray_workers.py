"""Our variables reach workers that Ray starts; other executors see no difference."""

from __future__ import annotations

import importlib.util
import os
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload_patch.integration.engine import hooks
from kvoffload_patch.integration.engine.ranks import ray_workers
from kvoffload_patch.integration.engine.ranks.ray_workers import PREFIXES, pass_variables_on

RAY = type("RayExecutorV2", (), {"__module__": "vllm.v1.executor.ray_executor_v2"})
OTHER = type("MultiprocExecutor", (), {"__module__": "vllm.v1.executor.multiproc_executor"})
DERIVED = type("Mine", (RAY,), {"__module__": "mine"})


@pytest.fixture(autouse=True)
def _release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVOFFLOAD_VLLM_VERSION", "0.17.0")
    monkeypatch.delenv(PREFIXES, raising=False)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (None, "KVOFFLOAD_"),
        ("", "KVOFFLOAD_"),
        ("MINE_, YOURS_", "MINE_,YOURS_,KVOFFLOAD_"),
        ("KVOFFLOAD_,MINE_", "KVOFFLOAD_,MINE_"),
    ],
)
def test_our_prefix_is_added_to_those_that_were_asked_for(asked: str | None, found: str) -> None:
    env = {} if asked is None else {PREFIXES: asked}
    pass_variables_on(DERIVED, env)
    assert env == {PREFIXES: found}


@pytest.mark.parametrize(
    ("executor", "release"), [(OTHER, "0.17.0"), (object(), "0.17.0"), (RAY, "0.16.0")]
)
def test_nothing_is_changed_without_ray_or_where_vllm_would_warn_of_it(
    executor: Any, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVOFFLOAD_VLLM_VERSION", release)
    env: dict[str, str] = {}
    pass_variables_on(executor, env)
    assert env == {}


def test_it_is_done_before_an_engine_makes_its_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "attach", lambda *_: None)
    seen: list[str | None] = []
    core = SimpleNamespace(vllm_config=None)
    for how in ((("config", RAY, True), {}), ((), {"vllm_config": 0, "executor_class": RAY})):
        hooks.init(lambda *_, **__: seen.append(os.environ.pop(PREFIXES, None)), core, *how)
    assert seen == ["KVOFFLOAD_", "KVOFFLOAD_"]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_copies_them_then(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.ray.ray_env import get_env_vars_to_copy

    monkeypatch.setenv("KVOFFLOAD_CPU_GIB", "1")
    assert "KVOFFLOAD_CPU_GIB" not in get_env_vars_to_copy()
    monkeypatch.setenv(PREFIXES, ray_workers.PREFIX)
    assert "KVOFFLOAD_CPU_GIB" in get_env_vars_to_copy()
