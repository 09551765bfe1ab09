"""A copy that never ends: who waits for it hears of it in time, and no engine stays silent."""

from __future__ import annotations

import re
import threading
import urllib.error
from pathlib import Path
from typing import Any

import pytest
from engine.hung_copies import DEADLINE_S, GRACE_S
from engine.server import Server

from scripts.soak import signals

LOST = "expected copy 1 from cpu to gpu to be done by now, found no progress for"
RAISED = rf"{LOST} 2 s; the device may still read or write its blocks"
ENDED = rf"{LOST} 4 s, 2 s of which it has held up the step .* so this process ends: restart"
LEFT = rf"{LOST} 4 s, 2 s of which .* is not vLLM's own, so it is left to you: end it"
# vLLM's client of `LLM` has seen that the engine's process has ended before it has read the message
# that says so. It then reads none, and who waits for an answer waits for ever, also without us.
UNTOLD = "MPClient: engine core exited unexpectedly"
# What vLLM takes to end, on a machine that has much else to do.
ENDING_S = 25.0
IN_TIME_S = DEADLINE_S + GRACE_S + ENDING_S

APART = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "TEST_FORK_WORKERS": "1"}
# An engine core in a process of its own, and its ranks: in processes of their own, or in that one.
WORKERS, ONE_PROCESS = APART, {**APART, "TEST_UNIPROC": "1"}


@pytest.mark.parametrize(
    ("processes", "where"),
    [
        pytest.param(WORKERS, "device", id="workers-device"),
        pytest.param(WORKERS, "output", id="workers-output", marks=pytest.mark.features),
        pytest.param(WORKERS, "driver", id="workers-driver", marks=pytest.mark.features),
        pytest.param(ONE_PROCESS, "device", id="one process-device"),
        pytest.param(ONE_PROCESS, "output", id="one process-output"),
        pytest.param(ONE_PROCESS, "driver", id="one process-driver"),
    ],
)
def test_who_waits_for_it_hears_that_the_engine_is_dead(
    real: Any, processes: dict[str, str], where: str
) -> None:
    """The rank cannot say so itself: it is blocked, or its engine waits for its output."""
    engine = {"async_scheduling": True} if where == "output" else {}
    for attempt in "123":
        env = {"TEST_HANG": f"load 1 {where}", "TEST_ATTEMPT": attempt, **processes}
        run = real.on(["waits_for_a_hung_load"], engine, tier={}, **env)
        found = run["waits_for_a_hung_load"]
        if found["heard"] or UNTOLD not in run.log:
            break
    ours = [line for line in run.log.splitlines() if "kvoffload" in line or "KV offload" in line]
    assert found["heard"] and found["heard"].startswith("EngineDeadError"), (ours, run.log[-3000:])
    assert DEADLINE_S < found["after_s"] < IN_TIME_S
    (said,) = [line for line in run.log.splitlines() if re.search(ENDED, line)]
    assert said.startswith("(EngineCore" if processes == ONE_PROCESS else "(Worker")


def test_a_process_of_the_users_own_is_not_ended(real: Any) -> None:
    run = real.on(["is_left_hanging"], tier={}, TEST_HANG="load 1 device")
    assert run["is_left_hanging"]["heard"] is None
    assert len(re.findall(LEFT, run.log)) == 1 and "process ends" not in run.log


def test_a_step_that_comes_by_raises_it_itself_and_the_engine_can_be_closed(real: Any) -> None:
    """A parked load holds up no step. Closing must not wait for what has just been given up."""
    parked = {"KVOFFLOAD_LOAD_MODE": "parked"}
    run = real.on(["waits_for_a_hung_load"], tier=parked, TEST_HANG="load 1 device")
    found = run["waits_for_a_hung_load"]
    assert found["heard"].startswith("TransferError"), run.log[-5000:]
    assert re.search(RAISED, found["heard"]) and "process ends" not in run.log
    assert found["after_s"] < DEADLINE_S + ENDING_S
    assert run.returncode == 0


def test_an_idle_engine_is_left_and_what_is_asked_next_hears_of_it_at_once(real: Any) -> None:
    run = real.on(["hangs_while_idle"], tier={}, TEST_HANG="store 1 device", **WORKERS)
    found = run["hangs_while_idle"]
    assert found["first"]["heard"] == "answered"
    assert found["second"]["heard"].startswith("EngineDeadError"), run.log[-5000:]
    assert found["second"]["after_s"] < ENDING_S
    assert "copy 1 from gpu to cpu" in run.log and "process ends" not in run.log


def test_a_reset_that_waits_for_it_fails_and_no_step_follows(real: Any) -> None:
    """vLLM tells who asked for the reset, and goes on; the scheduler does not."""
    run = real.on(["hangs_while_reset"], tier={}, TEST_HANG="store 1 device", **WORKERS)
    found = run["hangs_while_reset"]
    assert found["first"]["heard"] == "answered"
    assert "copy 1 from gpu to cpu" in found["reset"]["heard"], run.log[-5000:]
    assert found["reset"]["after_s"] < IN_TIME_S
    assert found["second"]["heard"].startswith("EngineDeadError")
    assert re.search(r"PromiseBroken: .*could not be detached .*restart the server", run.log)


OPTIONS = ["--num-gpu-blocks-override", "24", "--block-size", "32", "--max-num-seqs", "4"]


def test_a_server_is_not_healthy_any_more_and_ends(real: Any, tmp_path: Path) -> None:
    log, prompts = tmp_path / "log", [list(range(at, at + 300)) for at in range(3, 9)]
    hang = {"TEST_HANG": "load 1 device"}
    with Server(Path(real.model), log, OPTIONS, hang, real.warm) as server:
        for prompt in prompts:
            server.ask(prompt, 1)
        heard: list[Any] = []

        def ask() -> None:
            try:
                heard.append(server.ask(prompts[0], 1))
            except (OSError, urllib.error.HTTPError) as error:
                heard.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        assert server.get_status("/health") == 200
        ill = signals.wait_until(lambda: server.get_status("/health") != 200, IN_TIME_S)
        asking.join(IN_TIME_S)
        ended = signals.wait_until(lambda: server.status() is not None, ENDING_S)
        gone = signals.wait_until(lambda: not signals.session_of(server.pid), ENDING_S)
    said = log.read_text()
    assert ill is not None and len(re.findall(ENDED, said)) == 1, said[-5000:]
    assert len(heard) == 1 and isinstance(heard[0], OSError), heard
    assert ended is not None and gone is not None, said[-3000:]
