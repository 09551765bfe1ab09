"""Memory that the ranks of a host open through the engine's entry in /proc."""

from __future__ import annotations

import dataclasses
import mmap
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transfer.resident import files_opened_since, open_files

from kvoffload_patch.integration.shared_files import SharedFile

OTHER = """
import mmap, sys
from kvoffload_patch.integration.shared_files import SharedFileAddress

address = SharedFileAddress(sys.argv[1], sys.argv[2], (0, 1))
print(address.is_reachable(), flush=True)
memory = mmap.mmap(address.open(), 4096)
memory[7] = 77
print("written", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def file() -> Iterator[SharedFile]:
    made = SharedFile([4, 7])
    made.resize(4096)
    yield made
    made.close()


def test_a_process_that_dies_leaves_the_others_what_it_has_written(file: SharedFile) -> None:
    memory = mmap.mmap(file.address.open(), 4096)
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, file.address.path, file.address.name],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert other.stdin and other.stdout
    assert [other.stdout.readline() for _ in range(2)] == ["True\n", "written\n"]
    os.kill(other.pid, signal.SIGKILL)
    assert other.wait(30) == -signal.SIGKILL
    assert memory[7] == 77
    other.stdin.close()
    other.stdout.close()


def test_it_is_this_users_has_no_name_and_is_gone_with_the_last_that_has_it() -> None:
    file = SharedFile([0, 1])
    found = os.stat(file.address.path)
    assert stat.S_IMODE(found.st_mode) == 0o600 and found.st_nlink == 0
    assert file.address.ranks == (0, 1)
    own = file.address.open()
    assert os.fstat(own).st_ino == found.st_ino
    file.close()
    assert not file.address.is_reachable()
    os.close(own)


def test_another_file_at_the_same_place_is_not_taken_for_it(file: SharedFile) -> None:
    """As on another machine, where a process may have the same number and the same descriptor."""
    other = dataclasses.replace(file.address, name="/memfd:kvoffload-0123 (deleted)")
    assert file.address.is_reachable() and not other.is_reachable()
    before = open_files()
    with pytest.raises(OSError, match="found another file"):
        other.open()
    assert not files_opened_since(before)
    missing = dataclasses.replace(file.address, path="/proc/1/fd/9999999")
    assert not missing.is_reachable()


def test_a_file_that_cannot_be_made_this_users_alone_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def denied(*_: int) -> None:
        raise PermissionError("made to fail")

    before = open_files()
    monkeypatch.setattr(os, "fchmod", denied)
    with pytest.raises(PermissionError):
        SharedFile([0, 1])
    assert not files_opened_since(before)


def test_a_file_whose_name_cannot_be_read_is_closed(
    file: SharedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: str) -> str:
        raise PermissionError("made to fail")

    before = open_files()
    monkeypatch.setattr(os, "readlink", denied)
    with pytest.raises(PermissionError):
        file.address.open()
    monkeypatch.undo()
    assert not files_opened_since(before)


def test_the_file_of_another_process_of_the_same_number_is_not_taken_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a PID namespace of its own that has the /proc of the one around it."""
    kept = tmp_path / "kept"
    kept.write_bytes(b"all")
    code = (
        "import os, sys\n"
        "file = os.open(sys.argv[1], os.O_RDWR)\n"
        "for other in range(3, 64):\n"
        "    if other != file: os.dup2(file, other)\n"
        "print(flush=True)\n"
        "sys.stdin.read()"
    )
    command, pipe = [sys.executable, "-c", code, str(kept)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == b"\n"
        monkeypatch.setattr(os, "getpid", lambda: other.pid)
        file = SharedFile([0, 1])
        assert not file.address.is_reachable()
        with pytest.raises(OSError, match="another file"):
            file.address.open()
        file.close()
        other.stdin.close()
