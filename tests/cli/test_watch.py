"""A launched command that starts vLLM without our start-up code, with real processes.

Nothing here is timed: a test ends when the watch has acted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli.fake_engine import PATIENCE_S, until, with_engine
from sandbox import Sandbox

from kvoffload_patch.cli import watch

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")


@pytest.fixture
def box(tmp_path: Path) -> Sandbox:
    return with_engine(Sandbox(tmp_path / "box"))


@pytest.fixture
def other(tmp_path: Path) -> Sandbox:
    """Another Python's environment, without our package."""
    other = Sandbox(tmp_path / "other", startup_file=False)
    shutil.rmtree(other.package)
    return with_engine(other)


class Launched:
    """`python -m kvoffload_patch COMMAND`, in a session of its own."""

    def __init__(self, box: Sandbox, *command: object, start: list[str], **more: str) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVOFFLOAD", "PYTHON"))}
        self.process = subprocess.Popen(
            [str(box.python), *start, *map(str, command)],
            env={**kept, "ARM_LOG": str(box.arm_log), **more},
            cwd=box.root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def end(self) -> tuple[int, str, str]:
        """Wait: the exit status, and what is left of the output."""
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err


Launch = Callable[..., Launched]


@pytest.fixture
def launch(box: Sandbox) -> Iterator[Launch]:
    started: list[Launched] = []

    def run(*command: object, start: tuple[str, ...] = ("-m", "kvoffload_patch"), **more: str):
        started.append(Launched(box, *command, start=list(start), **more))
        return started[-1]

    yield run
    for each in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(each.process.pid, signal.SIGKILL)
        each.process.communicate(timeout=PATIENCE_S)


def wrapper(box: Sandbox, *lines: str) -> Path:
    return box.write(box.root / "wrapper.sh", "\n".join(lines) + "\n")


def bare(other: Sandbox, *kinds: str) -> str:
    """A line of a wrapper that runs the other Python's engine without our environment."""
    return " ".join(["env", "-i", f"{other.bin}/serve", *kinds])


def watchers(token: str) -> list[int]:
    """The watches of a launch: processes of our name whose environment is the launch's."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name = (folder / "comm").read_text().strip()
            if name == "kvoffload-watch" and token in (folder / "maps").read_text():
                found.append(int(folder.name))
    return found


def state(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def test_an_engine_of_another_python_is_ended_with_one_sentence(
    box: Sandbox, other: Sandbox, launch: Launch
) -> None:
    script = wrapper(box, bare(other, "ended", "child"))
    run = launch("bash", script)
    pids = {words[1]: int(words[-1]) for words in (run.line().split(), run.line().split())}
    status, out, err = run.end()
    assert status == 128 + signal.SIGKILL
    assert out == "ended fork stopped\n"  # what is below the engine is asked to stop
    _, sentence, *more = err.splitlines()
    began, who, why = sentence.partition(f" found process {pids['child']}, `{other.python} ")
    assert began == (
        f"kvoffload_patch: expected `{shutil.which('bash')} {script}` to start vLLM with the CPU"
        " tier,"
    )
    assert who and why.endswith(
        "`, in which kvoffload_patch did not run, so it was ended; install kvoffload_patch for that"
        " Python and pass the environment on to it, or set KVOFFLOAD_STRICT=0 to serve without the"
        " CPU tier."
    )
    assert not [line for line in more if "kvoffload_patch" in line]


def redirected(how: str) -> tuple[str, ...]:
    """A start of the launch by a shell that redirects its streams."""
    line = f'exec "$0" -m kvoffload_patch "$@" {how}'
    code = f"import os, sys; os.execvp('sh', ['sh', '-c', {line!r}, sys.executable, *sys.argv[1:]])"
    return "-c", code


@pytest.mark.parametrize("how", ["2>/dev/full", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_it_is_ended_whatever_the_streams_are(
    box: Sandbox, other: Sandbox, launch: Launch, how: str
) -> None:
    run = launch("bash", wrapper(box, bare(other, "ended")), start=redirected(how))
    assert run.end()[0] == 128 + signal.SIGKILL


def test_only_the_engine_without_our_code_is_ended(
    box: Sandbox, other: Sandbox, launch: Launch
) -> None:
    lines = ["serve armed & ", "serve armed disabled &", bare(other, "deaf") + " &"]
    lines[1] = "KVOFFLOAD_DISABLE=1 " + lines[1]
    more = [bare(other, "ended"), bare(other, "ended", "too"), "echo over $?", "wait"]
    script = wrapper(box, *lines, *more)
    run = launch("bash", script, PATH=f"{box.bin}:{os.environ['PATH']}")
    said = [run.line() for _ in range(6)]  # in any order
    said.remove(f"over {128 + signal.SIGKILL}")
    pids = {name: int(pid) for name, _, pid in (line.rpartition(" ") for line in said)}
    alive = {name for name, pid in pids.items() if state(pid) not in ("", "Z")}
    assert alive == {"armed", "armed disabled", "deaf"}
    assert pids.keys() - alive == {"ended", "ended too"}


NAMELESS = """\
import pathlib, runpy, sys
def write_text(*_, **__):
    raise OSError(30, "Read-only file system")
pathlib.Path.write_text = write_text
sys.argv[0] = ""
runpy.run_module("kvoffload_patch", run_name="__main__", alter_sys=True)
"""


def test_it_is_ended_where_proc_is_read_only(box: Sandbox, other: Sandbox, launch: Launch) -> None:
    run = launch("bash", wrapper(box, bare(other, "ended")), start=("-c", NAMELESS))
    status, _, err = run.end()
    assert status == 128 + signal.SIGKILL and "Traceback" not in err


def test_one_that_has_ended_by_itself_is_no_error() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    watch._end(ended.pid)


def test_the_next_one_is_ended_too(box: Sandbox, other: Sandbox, launch: Launch) -> None:
    again = [bare(other, "ended"), "echo $?"] * 2
    status, out, err = launch("bash", wrapper(box, *again)).end()
    assert out.splitlines()[1::2] == ["137", "137"]
    assert (status, err.count("did not run")) == (0, 2)


def test_open_serves_without_a_watch(box: Sandbox, other: Sandbox, launch: Launch) -> None:
    script = wrapper(box, "echo token $KVOFFLOAD_LAUNCH", bare(other, "open"))
    run = launch("bash", script, KVOFFLOAD_STRICT="0")
    assert run.line() == "token"
    assert run.line().startswith("open ")


@pytest.mark.parametrize("subreaper", [False, True])
def test_the_watch_ends_when_an_engine_has_attached(
    box: Sandbox, launch: Launch, subreaper: bool
) -> None:
    """As process 1 of a container the command inherits orphans: no zombie may be left to it."""
    start = "import ctypes, os, runpy, sys; sys.argv[0] = ''; os.dup2(1, 9)"
    start += "; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)" * subreaper
    start += "; runpy.run_module('kvoffload_patch', run_name='__main__', alter_sys=True)"
    token = f"test{os.getpid()}{subreaper}"
    code = ("-c", start)
    run = launch("serve", "armed", start=code, KVOFFLOAD_LAUNCH=token)
    assert run.line() == f"armed {run.process.pid}"  # the launch has become the command
    until(lambda: len(watchers(token)) == 1)
    (watch_pid,) = watchers(token)
    assert os.getsid(watch_pid) == watch_pid
    held = Path(f"/proc/{watch_pid}/fd")
    until(lambda: not (held / "9").exists())
    assert {os.readlink(held / number) for number in "01"} == {os.devnull}
    run = launch("serve", "armed", "attached", start=code, KVOFFLOAD_LAUNCH=token)
    assert run.line() == f"armed attached {run.process.pid}"
    if subreaper:
        until(lambda: _stderr(watchers_of(run)) == os.devnull)
        assert [state(pid) for pid in watchers_of(run)] == ["S"]
    else:
        until(lambda: watchers(token) == [watch_pid])
        assert watchers_of(run) == []


def watchers_of(run: Launched) -> list[int]:
    children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text()
    return [int(pid) for pid in children.split()]


def _stderr(pids: list[int]) -> str:
    (pid,) = pids
    return os.readlink(f"/proc/{pid}/fd/2")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("to_group", [False, True])
def test_signals_reach_the_command_and_its_status_comes_back(
    launch: Launch, number: int, to_group: bool
) -> None:
    run = launch("serve", "armed")
    assert run.line() == f"armed {run.process.pid}"
    (os.killpg if to_group else os.kill)(run.process.pid, number)
    status, out, err = run.end()  # standard error is closed: the watch has ended as well
    assert (status, out, len(err.splitlines())) == (7, "armed stopped\n", 1)


def test_a_command_without_vllm_is_left_alone(launch: Launch) -> None:
    status, out, err = launch("bash", "-c", "echo $$; exit 3").end()
    assert (status, len(out.split()), len(err.splitlines())) == (3, 1, 1)


def test_a_launch_within_a_launch_keeps_the_token(box: Sandbox, launch: Launch) -> None:
    code = "import os; print(os.environ['KVOFFLOAD_LAUNCH'])"
    inner = [box.python, "-m", "kvoffload_patch", "python", "-c", code]
    status, out, _ = launch(
        "python", "-m", "kvoffload_patch", *inner, KVOFFLOAD_LAUNCH="0a1b"
    ).end()
    assert (status, out) == (0, "0a1b\n")


def test_what_cannot_be_watched_is_said(box: Sandbox, launch: Launch) -> None:
    """A token too long for a name is as a system without named memory."""
    status, out, err = launch("bash", "-c", "echo 1", KVOFFLOAD_LAUNCH="x" * 300).end()
    assert (status, out) == (0, "1\n")
    assert "will not be noticed, because this system does not show" in err.splitlines()[1]


REFUSED = """\
import sys
from kvoffload_patch import launch_token
launch_token.tell("kvoffload_patch: expected one thing, found another; do a third.")
print("what vLLM prints after it", file=sys.stderr)
sys.exit(1)
"""


def test_why_an_engine_was_refused_is_the_last_line(box: Sandbox, launch: Launch) -> None:
    box.command("refused", REFUSED)
    status, _, said = launch("refused").end()
    assert (status, said.splitlines()[-2:]) == (
        1,
        [
            "what vLLM prints after it",
            "kvoffload_patch: expected one thing, found another; do a third.",
        ],
    )
