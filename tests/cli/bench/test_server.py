"""A server that starts, does not, or leaves processes behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from cli.bench import fake_vllm

from kvoffload_patch.cli.bench.errors import ServerFailed
from kvoffload_patch.cli.bench.server import HOST, Server, cache_tokens, free_port

CACHE = 'vllm:cache_config_info{block_size="16",engine="%d",num_gpu_blocks="%s"} 1.0\n'


def serve(folder: Path, *more: str, start_s: float = 60.0) -> Server:
    if not (folder / "vllm").exists():
        fake_vllm.write(folder)
    port = free_port()
    words = ["--host", HOST, "--port", str(port), "--num-gpu-blocks-override", "8"]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "M", *words, *more]
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    return Server(command, environ, port, folder / "log", start_s)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_all_processes_of_a_server_end_with_it(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        child = json.loads(server.get("/v1/models"))["child"]
        assert is_running(child)
        assert server.model() == "fake"
        assert server.gpu_tokens() == 128
    assert not is_running(child)
    assert server.get("/v1/models") == b""
    assert server.gpu_tokens() is None
    with pytest.raises(ServerFailed, match="does not name its model"):
        server.model()


def test_they_end_when_something_is_raised(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), serve(tmp_path) as server:
        child = json.loads(server.get("/v1/models"))["child"]
        raise KeyboardInterrupt
    assert not is_running(child)


def test_what_it_takes_to_end_is_said_if_it_ends_by_itself(tmp_path: Path) -> None:
    server = serve(tmp_path)
    server.start()
    server.wait()
    took = server.end()
    assert took is not None and 0 <= took < 30 and server.status() is not None
    assert server.end() is None, "it had ended"


def test_two_that_do_not_listen_yet_are_not_given_the_same_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvoffload_patch.cli.bench.server.PORTS", [free_port()])
    with pytest.raises(ServerFailed, match="is free"):
        free_port()


def deaf_server(folder: Path, end_s: float) -> Server:
    """One that has started, and does not end by itself."""
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True)"
    command = [sys.executable, "-c", f"{deaf}; time.sleep(600)"]
    server = Server(command, {}, free_port(), folder / "log", 1, end_s=end_s)
    server.start()
    until = time.monotonic() + 60
    while not (folder / "log").read_text():
        assert time.monotonic() < until
        time.sleep(0.01)
    return server


def test_one_that_does_not_end_is_killed(tmp_path: Path) -> None:
    server = deaf_server(tmp_path, 0.2)
    assert server.end() is None
    assert server.status() == -9 and not is_running(server.pid)


def test_who_does_not_wait_for_its_end_leaves_nothing_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = deaf_server(tmp_path, 600.0)
    terminate = server._process.terminate

    def again() -> None:
        terminate()
        signal.raise_signal(signal.SIGINT)  # Ctrl-C, for the second time

    monkeypatch.setattr(server._process, "terminate", again)
    with pytest.raises(KeyboardInterrupt):
        server.end()
    assert server.status() == -9 and not is_running(server.pid)


def test_a_server_that_ends_says_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed) as caught, serve(tmp_path, "--fail"):
        pass
    first, *lines = str(caught.value).splitlines()
    assert first == "the server ended with status 1 before it answered; its log ends with:"
    assert lines[-1] == "  no such model" and "the fake is told serve M" in lines[0]


def test_the_error_that_began_it_is_said_where_it_is_far_above_the_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    worker = "(VllmWorker-0 pid=7) ERROR 11-30 17:43:48 [multiproc_executor.py:953] "
    log.write_text(
        "(EngineCore pid=5) INFO 11-30 17:43:40 [a.py:1] kvoffload_patch: loads are waited for\n"
        f"{worker}Traceback (most recent call last):\n"
        f"{worker}    raise ValueError(\n"
        f"{worker}ValueError: Available memory on node 0 is less\n"
        f"{worker}ValueError: Available memory on node 0 is less\n"
        "kvoffload_patch: expected one thing, found another; correct it.\n"
        + 30 * '  File "utils.py", line 9, in launch\n'
        + "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    server = Server(["true"], {}, free_port(), log, 0.1)
    first, *lines = str(server.failure("it failed")).splitlines()
    assert first == "it failed; its log has, in this order:"
    assert lines[:3] == [
        "  ValueError: Available memory on node 0 is less",
        "  kvoffload_patch: expected one thing, found another; correct it.",
        "and ends with:",
    ]
    assert lines[-1].startswith("  RuntimeError: Engine core") and len(lines) == 23


def test_a_server_that_does_not_answer_is_ended(tmp_path: Path) -> None:
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    server = Server(sleeps, {}, free_port(), tmp_path / "log", 0.1)
    with pytest.raises(ServerFailed, match="the server did not answer within 0.1 s"), server:
        pass


@pytest.mark.parametrize(
    ("metrics", "tokens"),
    [
        (CACHE % (0, "10"), 160),
        (CACHE % (0, "10") + CACHE % (1, "12"), 352),
        (CACHE % (0, "None"), None),
        ("vllm:other 1\n", None),
        ("", None),
    ],
)
def test_the_gpu_cache_of_all_engines_counts(metrics: str, tokens: int | None) -> None:
    assert cache_tokens(metrics) == tokens
