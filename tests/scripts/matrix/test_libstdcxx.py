"""Versions that a library asks for are made weak, shown on a library of this process."""

from __future__ import annotations

import ctypes
import shutil
import struct
from pathlib import Path

import pytest

from scripts.matrix import libstdcxx


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
