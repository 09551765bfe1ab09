"""The tests of a vLLM release, which only its source distribution has."""

from __future__ import annotations

import hashlib
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from http.client import HTTPException
from pathlib import Path, PurePosixPath

from scripts.release.sources import TIMEOUT, NotFetched, cache_folder, opener

WANTED = ("tests/", "pyproject.toml")


def fetch_tests(release: str, cache: Path | None = None) -> Path:
    """The folder with ``tests/`` and ``pyproject.toml`` of ``release``, made if it is missing.

    It appears complete or not at all, also where two processes make it.

    Raises:
        NotFetched: its source distribution could not be had.
    """
    folder = cache_folder(cache) / f"tests-{release}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as made:
        try:
            unpack(_download(*_locate(release)), Path(made) / folder.name)
        except (OSError, HTTPException, tarfile.TarError) as error:
            raise NotFetched(f"the sources of vLLM {release} cannot be read ({error}).") from None
        try:
            (Path(made) / folder.name).rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise
    return folder


def unpack(archive: bytes, folder: Path) -> None:
    """Unpack the wanted files of a source distribution, without its own folder."""
    folder.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        for member in opened.getmembers():
            name = PurePosixPath(member.name.partition("/")[2])
            wanted = member.isfile() and str(name).startswith(WANTED) and ".." not in name.parts
            content = opened.extractfile(member) if wanted else None
            if content is not None:
                # Not `extract`: its filter is not in every patch release of Python.
                folder.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
                folder.joinpath(name).write_bytes(content.read())


def _locate(release: str) -> tuple[str, str]:
    """URL of the source distribution, and its SHA-256, as pip tells when it is asked to be verbose.

    Not every index says that with the URL; empty then.
    """
    command = [sys.executable, "-m", "pip", "index", "versions", "-vv", "vllm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    name = re.escape(f"vllm-{release}.tar.gz")
    digest = r"(?:#sha256=([0-9a-f]{64}))?(?!\S)"
    found = re.search(rf"Found link (\S+/{name}){digest}", done.stdout)
    if found is None:
        raise NotFetched(f"pip names no source distribution of vLLM {release}.")
    return found[1], found[2] or ""


def _download(url: str, digest: str) -> bytes:
    with opener().open(url, timeout=TIMEOUT) as answer:
        data = bytes(answer.read())
    if digest and hashlib.sha256(data).hexdigest() != digest:
        raise OSError(f"{len(data)} bytes that are not those of its index")
    return data
