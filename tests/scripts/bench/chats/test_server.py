"""What the servers of `bench chats` are started with, for each mode."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvoffload_patch.cli.bench.server import free_port
from scripts.bench.chats import server
from scripts.bench.chats.load import SMALL, Load
from scripts.bench.chats.server import Setup
from scripts.bench.common import visible_gpus


def setup(model: Path, load: Load = Load(), **changes: Any) -> Setup:  # noqa: B008
    made = Setup(model, load, False, {}, model / "out", 60.0, False, [])
    return replace(made, **changes)


def test_the_floor_is_plain_vllm_with_its_own_gpu_cache(tmp_path: Path) -> None:
    common = {
        "served_model_name": "bench",
        "skip_tokenizer_init": True,
        "enable_prompt_tokens_details": True,
        "load_format": "dummy",
    }
    assert server.arguments("floor", setup(tmp_path)) == common
    small = {**common, "num_gpu_blocks_override": 12_000}
    assert server.arguments("off", setup(tmp_path)) == small
    assert server.arguments("ours+KVOFFLOAD_LOAD_MODE=parked", setup(tmp_path)) == small
    held = server.arguments("floor", setup(tmp_path, Load(floor_gpu_blocks=50_000)))
    assert held["num_gpu_blocks_override"] == 50_000


@pytest.mark.parametrize(("mode", "gib", "switch"), [("simple", 72.0, "1"), ("offloading", 64, "")])
def test_the_connectors_in_the_tree(tmp_path: Path, mode: str, gib: float, switch: str) -> None:
    found = server.arguments(mode, setup(tmp_path))
    assert found["kv_offloading_size"] == gib and found["num_gpu_blocks_override"] == 12_000
    env = server.environment(mode, setup(tmp_path), "", 0)
    assert env.get("VLLM_USE_SIMPLE_KV_OFFLOAD", "") == switch


def test_weights_are_used_where_the_model_has_them(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("")
    found = server.arguments("floor", setup(tmp_path, SMALL, small=True, times=True))
    assert "load_format" not in found and found["max_model_len"] == SMALL.max_model_len
    assert found["enforce_eager"] and found["enable_per_request_metrics"]
    assert server.arguments("floor", setup(tmp_path, engine={"seed": 7}))["seed"] == 7


def test_arguments_become_words_of_a_command_line() -> None:
    words = server.flags({"a_b": True, "c_d": False, "size": 1.5, "config": {"x": 1}})
    assert words == ["--a-b", "--no-c-d", "--size", "1.5", "--config", '{"x": 1}']


def test_only_ours_is_started_by_the_package(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("KVOFFLOAD_ENABLE", "1")
    monkeypatch.setenv("KVOFFLOAD_STRICT", "0")
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    for mode in ("floor", "off", "ours+KVOFFLOAD_LOAD_MODE=parked", "simple"):
        words = server.command(mode, setup(tmp_path), 8123)
        ours = mode.startswith("ours")
        assert words[:3] == [sys.executable, "-m", "kvoffload_patch"] or not ours
        assert ("kvoffload_patch" in words) is ours
        assert words[words.index("serve") + 1] == str(tmp_path)
        assert words[words.index("--port") + 1] == "8123"
        env = server.environment(mode, setup(tmp_path), "", 0)
        assert "KVOFFLOAD_ENABLE" not in env and ("KVOFFLOAD_STRICT" in env) is ours
        assert ("KVOFFLOAD_LOAD_MODE" in env) is ours
        assert "VLLM_CACHE_ROOT" not in env


def test_side_by_side_each_has_a_gpu_and_a_cache_of_compiled_code(tmp_path: Path) -> None:
    envs = [server.environment("floor", setup(tmp_path), gpu, int(gpu)) for gpu in "01"]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in envs] == ["0", "1"]
    assert len({env["VLLM_CACHE_ROOT"] for env in envs}) == 2


def test_gpus_are_those_that_this_process_may_see(monkeypatch: Any) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5")
    assert visible_gpus(2) == ["2", "3"]
    with pytest.raises(ValueError, match="expected 4 GPUs .*, found 3"):
        visible_gpus(4)


def test_an_unknown_mode_is_refused_with_those_that_there_are() -> None:
    assert server.engine_mode("floor") == "off"
    with pytest.raises(ValueError, match="floor, off, ours"):
        server.engine_mode("flor")


def test_a_server_that_ends_is_not_waited_for() -> None:
    ended = server.Server([sys.executable, "-c", "raise SystemExit(3)"], free_port())
    with pytest.raises(server.ServerEnded, match="status 3"):
        ended.wait()
    ended.end()
