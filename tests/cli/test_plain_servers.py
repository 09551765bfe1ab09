"""vLLM servers without a tier are found among real processes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli.fake_engine import until, with_engine
from sandbox import Sandbox

from kvoffload_patch.cli import plain_servers, processes

Serve = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts an engine and waits until it listens."""
    box = with_engine(Sandbox(tmp_path / "box"))
    started = []

    def start(*kinds: str, **variables: str) -> subprocess.Popen[str]:
        one = subprocess.Popen(
            [str(box.bin / "serve"), *kinds], env=variables, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        started.append(one)
        assert one.stdout is not None
        one.stdout.readline()
        return one

    yield start
    for one in started:
        os.killpg(one.pid, signal.SIGKILL)
        one.communicate()


def reasons(tiers: set[int]) -> dict[int, str]:
    return {one["process"]: one["reason"] for one in plain_servers.found(tiers)}


def listening(one: subprocess.Popen[str]) -> bool:
    return processes.listens(one.pid)


def test_a_server_without_a_tier_is_named_with_what_its_environment_says(serve: Serve) -> None:
    off = serve("off")
    disabled = serve("disabled", KVOFFLOAD_ENABLE="1", KVOFFLOAD_DISABLE="1")
    on = serve("on", KVOFFLOAD_ENABLE="1", TMPDIR="")
    odd = serve("odd", KVOFFLOAD_ENABLE="what")
    mute = serve("mute", KVOFFLOAD_ENABLE="1", KVOFFLOAD_CONTROL="0")
    every = [off, disabled, on, odd, mute]
    until(lambda: all(map(listening, every)))
    found = reasons(set())
    switched_off = "its environment does not switch it on; use `kvoffload vllm serve MODEL`."
    asked = "it has KVOFFLOAD_CONTROL=0, so it cannot be asked."
    unknown = (
        "it is starting or ending, or its log says why; if not, the folder of its socket "
        "was removed: restart it."
    )
    told = [switched_off] * 2 + [unknown] * 2 + [asked]
    assert [found[one.pid] for one in every] == told
    assert reasons({off.pid}).keys() & {one.pid for one in every} == {one.pid for one in every[1:]}


def test_a_server_whose_socket_is_in_another_folder_is_named_with_its_variables(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of another login, whose engine no command finds."""
    monkeypatch.setenv("TMPDIR", "/same")
    where = {"XDG_RUNTIME_DIR": "/a b\x1b", "TMPDIR": "/same"}
    one = serve("elsewhere", KVOFFLOAD_ENABLE="1", **where)
    until(lambda: listening(one))
    assert reasons(set())[one.pid] == (
        "it is starting or ending, or its log says why; if not, its socket is elsewhere: ask with "
        "'XDG_RUNTIME_DIR=/a b\\x1b'."
    )


def test_a_server_of_another_user_is_to_be_asked_as_that_user(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root sees one: a shell within a container, whose server has a user of its own."""
    one, owner = serve("foreign", KVOFFLOAD_ENABLE="1", TMPDIR="/own"), os.geteuid()
    until(lambda: listening(one))
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert reasons(set())[one.pid] == (
        "it is starting or ending, or its log says why; if not, "
        f"user {owner} runs it: ask as that user."
    )


def test_an_engine_below_its_server_counts_for_it(serve: Serve) -> None:
    """The first process of a server is named, and it has a tier if one of its engines has."""
    server = serve("child")  # a fork of it listens
    until(lambda: len(processes.below(server.pid, processes.all_parents())) == 2)
    _, engine = processes.below(server.pid, processes.all_parents())
    until(lambda: processes.listens(engine))
    found = {one["process"]: one for one in plain_servers.found(set())}
    assert server.pid in found and engine not in found
    said = plain_servers.text(found[server.pid])
    assert said.startswith(f"process {server.pid}, `")
    # The command may be shown in part: paths of tests are long in places.
    assert "`, has no tier to be seen: its environment does not switch it on;" in said
    assert server.pid not in reasons({engine})


def test_workers_below_an_engine_that_has_not_loaded_vllm_itself_count_for_its_server(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    above, engine, worker = 1 << 30, (1 << 30) + 1, serve("worker").pid
    real = processes.all_parents
    parents = {above: 1, engine: above, worker: engine}
    monkeypatch.setattr(processes, "all_parents", lambda: {**real(), **parents})
    until(lambda: processes.listens(worker))
    assert worker in reasons(set())
    assert worker not in reasons({engine})


@pytest.mark.parametrize(
    "name", ["VLLM::EngineCore_DP0", "python -c from multiprocessing.spawn", ""]
)
def test_engines_below_a_process_that_has_not_loaded_vllm_are_one_server(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As with several API servers. Without a name of its own, a fork has its parent's."""
    launcher, above = 1 << 30, (1 << 30) + 1
    engines = [serve("one").pid, serve("two").pid]
    until(lambda: all(map(processes.listens, engines)))
    parents, commands = processes.all_parents, processes.read
    lines = {launcher: "python\0launch", above: "vllm\0serve", **dict.fromkeys(engines, name)}
    lines = {pid: line or lines[above] for pid, line in lines.items()}
    made = {launcher: 1, above: launcher, **dict.fromkeys(engines, above)}
    monkeypatch.setattr(processes, "all_parents", lambda: {**parents(), **made})

    def read(path: str) -> str:
        for pid, line in lines.items():
            if path == f"/proc/{pid}/cmdline":
                return line
        return commands(path)

    monkeypatch.setattr(processes, "read", read)
    assert reasons(set()).keys() & lines.keys() == {above}
    assert not reasons({engines[1]}).keys() & lines.keys()


def test_a_program_that_has_loaded_vllm_and_starts_servers_is_none_of_them(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = {serve("one").pid, serve("two").pid}
    until(lambda: all(map(processes.listens, servers)))
    own, maps_of = os.getpid(), processes.maps_of
    loaded = maps_of(next(iter(servers)))
    monkeypatch.setattr(processes, "maps_of", lambda pid: loaded if pid == own else maps_of(pid))
    assert reasons(set()).keys() & {own, *servers} == servers


def test_a_server_that_sees_other_files_is_left_out(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a container: its engines have sockets that cannot be found from here."""
    server = serve("off")
    until(lambda: listening(server))
    assert server.pid in reasons(set())
    monkeypatch.setattr(plain_servers.os, "readlink", lambda path: path)
    assert server.pid not in reasons(set())
