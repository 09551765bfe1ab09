"""What is read from /proc."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from kvoffload_patch.cli import processes


def test_a_long_command_is_shown_in_part() -> None:
    assert processes.brief(["a b", "c"]) == "'a b' c"
    assert processes.brief(["\x1b[2J"]) == r"'\x1b[2J'"
    long = processes.brief(["x" * 1000])
    assert (len(long), long[-4:]) == (processes.SHOWN, "x...")


@pytest.mark.parametrize(
    "kernels", ["vllm/_C.abi3.so", "vllm/_C_AVX512.abi3.so", "vllm/_moe_C.abi3.so"]
)
def test_vllms_compiled_code_is_known(kernels: str) -> None:
    line = "7f29-7f30 r-xp 00000000 00:01 10 /x/site-packages/{}\n"
    assert processes.has_loaded_vllm(line.format(kernels) + line.format("b.so"))
    for foreign in ("vllm/lib/torch/_C.so", "vllm/fast.so", "xvllm/_C.so", "vllm/_C.so (deleted)"):
        assert not processes.has_loaded_vllm(line.format(foreign))


def test_processes_are_found_below_each_other_and_up_to_the_first_of_some() -> None:
    parents = {1: 0, 2: 1, 3: 2, 4: 3, 5: 1}
    assert processes.below(2, parents) == [2, 3, 4]
    assert processes.above(4, parents) == [4, 3, 2, 1]
    assert processes.top(4, {2, 3, 4}, parents) == 2
    assert processes.top(4, {2, 4}, parents) == 4
    assert processes.all_parents()[os.getpid()] == os.getppid()


def test_who_listens_is_known() -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        before = processes.listens(os.getpid())
        one.listen()
        assert processes.listens(os.getpid())
    assert processes.listens(os.getpid()) == before


def test_names_of_sockets_hide_nobody_who_listens() -> None:
    """Any process of the machine may give its socket such a name."""
    with socket.socket(socket.AF_UNIX) as odd, socket.socket() as one:
        odd.bind(f"\0{os.getpid()}\nx\n\v0A 00010000 \u2028")
        one.listen()
        assert processes.listens(os.getpid())


def test_what_is_closed_meanwhile_hides_nobody_who_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    readlink, closed = os.readlink, list[str]()

    def first_is_closed(path: str) -> str:
        if not closed:
            closed.append(path)
            raise FileNotFoundError(path)
        return readlink(path)

    with socket.socket() as one:
        one.listen()
        monkeypatch.setattr(os, "readlink", first_is_closed)
        assert processes.listens(os.getpid()) and closed


def test_a_process_that_has_ended_has_nothing() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert processes.maps_of(ended.pid) == processes.command_of(ended.pid) == ""
    assert not processes.listens(ended.pid)
