"""Lets vLLM's libraries load on a machine whose libstdc++ is older than theirs.

Some CPU wheels (0.9.2 to 0.11.2) were built by GCC 13 or 14 and ask for symbol versions that
Debian 12's libstdc++ does not have, each for the sake of one function of two lines. Here these
requirements are marked weak, and a library with the two functions is preloaded. Where libstdc++
is new enough, nothing is touched.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = """
#include <exception>
#include <ios>
// GLIBCXX_3.4.32: called where objects from before GCC 13 hold an ios_base::Init.
namespace std { void ios_base_library_init() { static ios_base::Init once; } }
// CXXABI_1.3.15: called where an exception leaves a function that promised to throw none.
extern "C" void __cxa_call_terminate(void*) { std::terminate(); }
"""
FUNCTIONS = {
    b"GLIBCXX_3.4.32": "_ZSt21ios_base_library_initv",
    b"CXXABI_1.3.15": "__cxa_call_terminate",
}
NEEDED_VERSIONS = 0x6FFFFFFE  # SHT_GNU_verneed
WEAK = 2  # VER_FLG_WEAK


def make_loadable(environment: Path) -> dict[str, str]:
    """Mend vLLM's libraries in an environment; the variables that processes then need."""
    libstdcxx = ctypes.CDLL("libstdc++.so.6")
    missing = {v for v, function in FUNCTIONS.items() if not hasattr(libstdcxx, function)}
    mended = [
        library
        for library in environment.glob("lib/python*/site-packages/vllm/*.so")
        if _weaken(library, missing)
    ]
    if not mended:
        return {}
    preload = environment / "lib" / "libnewer.so"
    command = ["g++", "-shared", "-fPIC", "-O1", "-x", "c++", "-", "-o", str(preload)]
    subprocess.run(command, input=SOURCE, text=True, check=True)
    return {"LD_PRELOAD": os.pathsep.join([str(preload), *_preloaded()])}


def _preloaded() -> list[str]:
    already = os.environ.get("LD_PRELOAD")
    return [already] if already else []


def _weaken(library: Path, versions: set[bytes]) -> bool:
    """Mark requirements of these versions weak; whether there were any."""
    data = bytearray(library.read_bytes())
    found = [flags for flags, name in _requirements(data) if name in versions]
    for flags in found:
        struct.pack_into("<H", data, flags, WEAK)
    if found:
        # A new file: this one may share its bytes with the installer's cache.
        mended = library.with_suffix(".mended")
        mended.write_bytes(data)
        shutil.copymode(library, mended)
        mended.replace(library)
    return bool(found)


def _requirements(data: bytearray) -> list[tuple[int, bytes]]:
    """(offset of the flags, name) of each symbol version that a 64-bit ELF library asks for."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
    found = []
    for section in sections:
        if section[1] != NEEDED_VERSIONS:
            continue
        names, at, following = sections[section[6]][4], section[4], 1
        while following:
            _, versions, _, first, following = struct.unpack_from("<HHIII", data, at)
            entry = at + first
            for _ in range(versions):
                _, _, _, name, step = struct.unpack_from("<IHHII", data, entry)
                end = data.index(b"\0", names + name)
                found.append((entry + 4, bytes(data[names + name : end])))
                entry += step
            at += following
    return found
