"""The folder of the sockets is its user's alone, and is gone when the last socket is."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from kvoffload_patch.control import folder as folders
from kvoffload_patch.control.errors import Refused


def path_of(runtime: dict[str, str]) -> Path:
    return Path(runtime["XDG_RUNTIME_DIR"]) / "kvoffload"


def test_it_is_made_for_its_user_alone_and_removed_when_nothing_is_in_it(
    runtime: dict[str, str],
) -> None:
    with folders.making(runtime) as folder:
        assert stat.S_IMODE(path_of(runtime).stat().st_mode) == 0o700
    folders.leave(folder)
    assert not path_of(runtime).exists()


def test_it_stays_while_another_has_a_socket_in_it(runtime: dict[str, str]) -> None:
    with folders.making(runtime) as folder:
        (path_of(runtime) / "1-2.sock").touch()
    folders.leave(folder)
    assert path_of(runtime).exists()


@pytest.mark.parametrize("mode", [0o710, 0o701, 0o755])
def test_one_that_others_can_enter_is_refused_and_the_next_one_taken(
    mode: int, runtime: dict[str, str]
) -> None:
    path_of(runtime).mkdir()
    path_of(runtime).chmod(mode)
    with pytest.raises(Refused, match=f"found mode {mode:o} and owner {os.geteuid()}"):
        folders.open_one(path_of(runtime))
    with folders.making(runtime) as folder:
        taken = Path(os.readlink(f"/proc/self/fd/{folder}"))
        assert taken == folders.candidates(runtime)[1]
    folders.leave(folder)


def test_a_link_is_no_folder(runtime: dict[str, str], tmp_path: Path) -> None:
    """Anybody who may write to the shared folder could send a socket elsewhere."""
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    path_of(runtime).symlink_to(own)
    with pytest.raises(OSError):
        folders.open_one(path_of(runtime))


def test_where_none_can_be_made_all_reasons_are_said(
    runtime: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "candidates", lambda environ: [Path("/proc/a"), Path("/proc/b")])
    with pytest.raises(Refused, match="/proc/a.*; .*/proc/b'[.]$"), folders.making(runtime):
        pass


def test_one_that_is_removed_before_it_is_locked_is_made_again(
    runtime: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_made, removed = folders._lock, list[int]()

    def lock(folder: int) -> None:
        as_made(folder)
        if not removed:
            removed.append(folder)
            path_of(runtime).rmdir()

    monkeypatch.setattr(folders, "_lock", lock)
    with folders.making(runtime) as folder:
        assert removed and os.fstat(folder).st_nlink and path_of(runtime).exists()
    folders.leave(folder)


def test_a_lock_that_is_held_is_not_waited_for_long(
    runtime: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "LOCK_S", 0.05)
    with folders.making(runtime) as folder:
        other = folders.open_one(path_of(runtime))
        with pytest.raises(Refused, match="found it held"), folders.locked(other):
            pass
        os.close(other)
    folders.leave(folder)


def test_sockets_of_killed_processes_are_removed_and_others_are_not(
    runtime: dict[str, str],
) -> None:
    with folders.making(runtime) as folder:
        (path_of(runtime) / "note").touch()
        alive, killed = (socket.socket(socket.AF_UNIX) for _ in range(2))
        alive.bind(folders.address(folder, "1-a.sock"))
        alive.listen()
        killed.bind(folders.address(folder, "2-b.sock"))
        killed.close()
        assert folders.sockets(folder) == ["1-a.sock", "2-b.sock"]
        folders.remove_stale(folder)
        assert folders.sockets(folder) == ["1-a.sock"]
        alive.close()
    folders.leave(folder)
    assert (path_of(runtime) / "note").exists()


def test_what_no_engine_has_made_is_no_socket(runtime: dict[str, str]) -> None:
    """A command takes the first part of a name for a process."""
    with folders.making(runtime) as folder:
        (path_of(runtime) / "made-1.sock").mkdir()
        (path_of(runtime) / "note.sock").touch()
        assert folders.sockets(folder) == []
        folders.remove_stale(folder)
        assert folders._NAME.fullmatch(folders.new_name())
    folders.leave(folder)
    assert (path_of(runtime) / "note.sock").exists()


def test_one_that_takes_nobody_is_alive(
    runtime: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "CONNECT_S", 0.02)
    with folders.making(runtime) as folder:
        busy = socket.socket(socket.AF_UNIX)
        busy.bind(folders.address(folder, "1-a.sock"))
        busy.listen(0)
        waiting = folders.connect(folder, "1-a.sock")
        with pytest.raises(BlockingIOError):
            folders.connect(folder, "1-a.sock")
        folders.remove_stale(folder)
        assert folders.sockets(folder) == ["1-a.sock"]
        busy.close()
        assert waiting is not None
        waiting.close()
        folders.remove_stale(folder)
    folders.leave(folder)


def test_one_that_is_removed_before_it_is_opened_is_made_again(
    runtime: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_made, removed = folders.open_one, list[Path]()

    def open_one(path: Path) -> int:
        if not removed:
            removed.append(path)
            path.rmdir()
        return as_made(path)

    monkeypatch.setattr(folders, "open_one", open_one)
    with folders.making(runtime) as folder:
        assert removed == [path_of(runtime)] and path_of(runtime).exists()
    folders.leave(folder)


def test_without_a_folder_for_temporary_files_others_are_looked_into(
    runtime: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> str:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(folders.tempfile, "gettempdir", none)
    assert folders.candidates(runtime)[0] == path_of(runtime)
    assert folders.candidates({}) == [folders.SHARED / f"kvoffload-{os.geteuid()}"]
