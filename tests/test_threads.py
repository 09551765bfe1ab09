"""`JoinedThread`: a process ends with its own status, whatever its threads are in."""

from __future__ import annotations

import ast
import signal
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from exits import TIMES, exits

from kvoffload_patch import threads
from kvoffload_patch.threads import JoinedThread

ROOT = Path(__file__).resolve().parents[1]

# Modules that start other threads: not daemons, or in the standard library alone.
OTHERS = {
    "kvoffload_patch/cli/bench/load.py": "asks servers by http.client",
    "kvoffload_patch/control/listener.py": "answers on sockets",
    "scripts/bench/probes/touch.py": "not daemons: Python waits for them",
    "scripts/soak/signals.py": "asks a server by http.client",
    "scripts/soak/traffic.py": "asks a server by http.client",
    "scripts/soak/watch.py": "reads /proc",
}

LOOP = """
import threading
from kvoffload_patch.threads import JoinedThread
over, memory = threading.Event(), torch.zeros(64, dtype=torch.uint8)
def loop():
    while not over.is_set():
        memory[::2].zero_()
"""


needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="there is no torch")


@needs_torch
def test_a_process_ends_with_its_own_status_while_a_thread_is_in_torch() -> None:
    assert exits(LOOP + "JoinedThread(loop, 'loop', over.set).start()") == [0] * TIMES


@needs_torch
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="it hangs there instead")
def test_a_plain_daemon_thread_aborts_it() -> None:
    """Otherwise the test above shows nothing."""
    found = exits(LOOP + "threading.Thread(target=loop, daemon=True).start()")
    assert int(signal.SIGABRT) in found


def test_a_thread_that_does_not_stop_does_not_keep_the_process() -> None:
    imports = "from kvoffload_patch import threads\nthreads.EXIT_S = 0.2"
    begin = time.monotonic()
    hung = "threads.JoinedThread(time.sleep, 'hung', None, (600,)).start()"
    assert exits(hung, imports) == [0] * TIMES
    assert time.monotonic() - begin < 100


def test_only_threads_that_run_are_kept() -> None:
    over = threading.Event()
    thread = JoinedThread(over.wait, "waits", over.set)
    assert thread not in threads._running
    thread.start()
    assert thread in threads._running
    with pytest.raises(RuntimeError):
        thread.start()
    assert thread in threads._running
    thread.request_stop()
    thread.join(20)
    assert not thread.is_alive() and thread not in threads._running


def test_one_that_was_not_started_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(self: threading.Thread) -> None:
        raise RuntimeError("no more threads")

    monkeypatch.setattr(threading.Thread, "start", no_more)
    thread = JoinedThread(time.time, "none", None)
    with pytest.raises(RuntimeError):
        thread.start()
    assert thread not in threads._running


def names_threads(file: Path) -> bool:
    """Whether it names a class of Python's own threads."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    named = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    taken = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return bool(named & {"Thread", "Timer"}) or "threading" in {node.module for node in taken}


def test_no_module_starts_another_kind_of_thread_beside_torch() -> None:
    files = [f for top in ("kvoffload_patch", "scripts") for f in (ROOT / top).rglob("*.py")]
    found = {str(file.relative_to(ROOT)) for file in files if names_threads(file)}
    assert found - {"kvoffload_patch/threads.py"} == set(OTHERS)
