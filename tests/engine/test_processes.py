"""Executors, runners and schedulers: the tier reaches every process, and names what fails."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import pytest
from engine import engines, release
from engine import plain as vllm
from engine.report import assert_same

INSTALLED = Path(sysconfig.get_path("purelib"), "kvoffload_patch.pth").exists()
TP = {"tensor_parallel_size": 2}
# Forked ranks take seconds; those of APART are spawned, and import vLLM as a user's do.
FORKED = {"TEST_FORK_WORKERS": "1"}
# A worker in a process of its own, below an engine core in a process of its own.
APART = {"distributed_executor_backend": "mp"}
INTERPRETED = {"TEST_TRITON": "1"}  # in a process of its own: it is before any import of vLLM
CORE_APART = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


@pytest.fixture(scope="module")
def conversations(plain):
    return plain["conversations"]


def check(on, off, least=1.0):
    """The same tokens, and what had left the GPU's cache came back from CPU memory."""
    played = on["conversations"]
    assert_same(played, off)
    assert off["cached"] == 0
    assert least * engines.evicted_tokens() <= played["cached"] <= engines.evicted_tokens()


@pytest.mark.matrix
def test_async_scheduling(real, conversations):
    if release.no_async_scheduling():
        pytest.skip(release.no_async_scheduling())
    run = real.on(["setup", "conversations"], {"async_scheduling": True}, late=3)
    assert run["setup"]["scheduler"] == "AsyncScheduler" and run["setup"]["in_flight"] == 2
    check(run, conversations, least=0.9)


def test_async_scheduling_off(real, conversations):
    if release.no_async_scheduling():
        pytest.skip(release.no_async_scheduling())
    run = real.on(["setup", "conversations"], {"async_scheduling": False}, late=3)
    assert run["setup"]["scheduler"] == "Scheduler" and run["setup"]["in_flight"] == 1
    check(run, conversations, least=0.9)


@pytest.mark.matrix
@pytest.mark.parametrize("runner", ["0", "1"], ids=["runner-v1", "runner-v2"])
def test_both_model_runners(real, conversations, runner):
    if release.no_second_runner():
        pytest.skip(f"{release.no_second_runner()}; every other test has V1")
    second = runner == "1"
    env = {"VLLM_USE_V2_MODEL_RUNNER": runner, **(INTERPRETED if second else {})}
    asked = ["setup", "conversations"]
    if second and vllm.may_fail():
        vllm.must_play(real.off(asked, fresh=True, **env))
    run = real.on(asked, fresh=second, **env)
    assert run["setup"]["runner"].endswith("gpu.model_runner") == (runner == "1")
    check(run, conversations)


@pytest.mark.matrix
def test_two_ranks(real):
    off = real.off(["twins"], TP, **FORKED)["twins"]
    on = real.on(["twins"], TP, **FORKED)["twins"]
    assert_same(on, off)
    assert off["cached"][0] == 0 and on["cached"] == [640, 640]
    assert on["blocks_loaded"] == 640 // release.block_size()


@pytest.mark.matrix
def test_two_ranks_that_grow_and_do_not_get_the_same(real):
    off = real.off(["conversations", "twins"], TP, **FORKED)
    more = {"TEST_GROWTH": "90 63", "KVOFFLOAD_EVICTION": "lru"}  # the twins' prefix is new
    run = real.on(["conversations", "twins", "setup"], TP, **FORKED, **more)
    for played in ("conversations", "twins"):
        assert_same(run[played], off[played])
    assert run["twins"]["blocks_loaded"] > 0, "what is asked again after it has grown"
    assert run["setup"]["slots"] == 63, "what one rank will never have was used, or not all"


@pytest.mark.skipif(not INSTALLED, reason="the start-up file is not installed")
def test_the_start_up_file_reaches_engine_core_and_worker(real, conversations):
    check(real.on(["conversations"], APART, way="flag", **CORE_APART), conversations)


@pytest.mark.skipif(not INSTALLED, reason="the start-up file is not installed")
def test_the_plugin_entry_point_alone_is_enough(real, conversations):
    check(real.on(["conversations"], way="plugin"), conversations)


def test_adapters_are_kept_apart(real):
    import os

    env = {"TEST_LORAS": os.pathsep.join(real.loras)}
    off = vllm.must_play(real.off(["loras"], LORA, **env))["loras"]
    on = real.on(["loras"], LORA, **env)["loras"]
    assert len({tuple(answer) for answer in off["tokens"]}) == 3, "the adapters answer the same"
    assert on["tokens"] == off["tokens"]
    found = 499 // release.block_size() * release.block_size()
    assert on["cached"] == [0, 0, 0, found, found, found]


@pytest.mark.features
@pytest.mark.parametrize("how", ["adapter_loaded_again", "adapter_unloaded"])
def test_an_adapter_that_is_loaded_again_gets_nothing_of_the_one_before(how, real, tmp_path):
    import os
    import shutil

    folders = [str(shutil.copytree(lora, tmp_path / f"{n}")) for n, lora in enumerate(real.loras)]
    env = {"TEST_LORAS": os.pathsep.join(folders)}
    off = vllm.must_play(real.off([how], LORA, **env))[how]
    shutil.rmtree(f"{folders[0]}-again", ignore_errors=True)
    on = real.on([how], LORA, **env)
    assert off["tokens"][0] != off["tokens"][2], "the adapters answer the same"
    assert on[how]["tokens"] == off["tokens"]
    found = 499 // release.block_size() * release.block_size()
    assert on[how]["cached"] == [0, found, 0, 0, 0, found]
    assert "LoRA adapter again was loaded again under its name" in on.log


def test_a_killed_worker_ends_in_an_error_that_names_it(real):
    run = real.on(["worker_killed"], TP, **FORKED)
    killed = run["worker_killed"]
    assert killed["error"], "the request after the kill was answered"
    # Every line of that worker's own log begins with its name, so the sentence is looked for.
    assert re.search(r"Worker proc VllmWorker-1\S* died unexpectedly", run.log), run.log[-3000:]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_failed_canary_is_named_and_nothing_is_served(real, rank):
    run = real.on(["conversations"], TP, TEST_CANARY_FAULT=rank, **FORKED)
    assert run.returncode != 0 and not run.results
    assert f"rank {rank} (pid " in run.log
    assert "failed to open the CPU tier: a block stored to CPU memory" in run.log


def test_a_failed_canary_without_strict_serves_plain_vllm(real, conversations):
    run = real.on(["conversations"], tier={"KVOFFLOAD_STRICT": "0"}, TEST_CANARY_FAULT="0")
    assert run["conversations"]["tokens"] == conversations["tokens"]
    assert run["conversations"]["cached"] == 0
    assert "Serving without the CPU tier." in run.log


OPEN = {"KVOFFLOAD_STRICT": "0"}
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model"
REPLACED = {
    # The engine core's own process is not told of it but by its parent.
    "engine core": ("vllm.v1.engine.core:EngineCore.__init__", {}, CORE_APART),
    "runner, while the engine core starts": (RUNNER, {}, {}),
    "runner, in workers alone": (f"children:{RUNNER}", TP, FORKED),
}


@pytest.mark.features
@pytest.mark.parametrize("what", REPLACED)
def test_a_function_that_others_have_replaced_without_strict_serves_plain_vllm(
    real, conversations, what
):
    target, engine, env = REPLACED[what]
    how = {"fresh": True, "TEST_REPLACED": target, **env}
    run = real.on(["conversations"], engine, OPEN, **how)
    assert_same(run["conversations"], conversations)
    assert run["conversations"]["cached"] == 0
    assert "Nothing was patched; set KVOFFLOAD_STRICT=0" in run.log
    # A worker says it, and the engine, which hears of it from the workers, says whose it is.
    said = 3 if engine else 1
    assert run.log.count("Serving without the CPU tier.") == said, run.log[-3000:]


def test_prefix_caching_off_is_said_and_the_tier_stays_out(real, conversations):
    run = real.on(["conversations"], {"enable_prefix_caching": False})
    assert "prefix caching is off, so there is nothing to keep; no CPU tier" in run.log
    assert run["conversations"]["tokens"] == conversations["tokens"]
    assert run["conversations"]["tier"]["stored"] == 0


def test_more_memory_than_there_is_is_refused_before_vllm_starts(real):
    run = real.on(["conversations"], tier={"KVOFFLOAD_CPU_GIB": "60000"}, fresh=True)
    assert run.returncode == 2 and not run.results
    assert "lower KVOFFLOAD_CPU_GIB" in run.log and "Initializing a V1" not in run.log


def test_a_size_that_is_left_to_the_machine_is_said_with_its_reason(real, conversations):
    run = real.on(["conversations"], tier={"KVOFFLOAD_CPU_GIB": "auto"})
    assert "GiB over all ranks, chosen: 1/2 of the " in run.log
    assert "1 GiB of which stay free" in run.log
    assert run["conversations"]["tokens"] == conversations["tokens"]
    assert run["conversations"]["tier"]["stored"] > 0
