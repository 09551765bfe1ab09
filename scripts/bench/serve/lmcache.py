"""python scripts/bench lmcache [--version 0.5.3] [--python 3.12] --out lmcache.tar.xz

Packs LMCache for a machine without network that has vLLM, PyTorch and CUDA of the right versions.
There: `tar xJf lmcache.tar.xz -C DIR` and put DIR on PYTHONPATH; `scripts/bench serve` finds it.

What is left out: GPU code for other chips than sm_90 (blanked, so that the files stay valid), the
native clients of remote stores, and dependencies that vLLM or PyTorch bring, or that are imported
only by back ends which are not used here.

LMCache's wheels are built for one PyTorch each and do not say which. Those of 0.5.5 and 0.5.6 need
a symbol that PyTorch 2.11 does not have (the constructor of c10::NotImplementedError); 0.4.7 to
0.5.3 find all their symbols in it, and want CUDA 13.
"""

from __future__ import annotations

import argparse
import mmap
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from scripts import Refused
from scripts.bench import arguments

FATBIN_MAGIC = struct.pack("<I", 0xBA55ED50)
KEEP_ARCH = 90
ELF = 2
EXTRA = ("aiofile", "caio")  # imported at its top level, and in no vLLM
LEFT_OUT = ("lmcache_redis", "lmcache_fs")


def download(wanted: str, python: str, folder: Path) -> None:
    """One wheel, unpacked into the folder."""
    with tempfile.TemporaryDirectory() as scratch:
        platforms = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
        command = (
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
             "--python-version", python, *(a for p in platforms for a in ("--platform", p)),
             wanted, "-d", scratch]
        )  # fmt: skip
        if subprocess.run(command, check=False).returncode:
            raise Refused(
                f"expected a wheel of {wanted} for Python {python}, found what pip says above;"
                " give another --version or --python"
            )
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            wheel.extractall(folder)


def blank_other_chips(library: Path) -> int:
    """Zero the GPU code for other chips; returns the bytes kept."""
    kept = at = 0
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as image:
        while (start := image.find(FATBIN_MAGIC, at)) >= 0:
            version, header, size = struct.unpack_from("<HHQ", image, start + 4)
            at = start + 4
            if (version, header) != (1, 16) or start + 16 + size > len(image):
                continue
            entry, at = start + header, start + header + size
            while entry < at:
                kind, _, skip, length = struct.unpack_from("<HHIQ", image, entry)
                (chip,) = struct.unpack_from("<I", image, entry + 28)
                if kind == ELF and chip == KEEP_ARCH:
                    kept += length
                else:
                    image[entry + skip : entry + skip + length] = bytes(length)
                entry += skip + length
    return kept


def main() -> None:
    """Download, cut, pack."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", default="0.5.3")
    parser.add_argument("--python", default="3.12")
    parser.add_argument("--out", type=arguments.target, default=Path("lmcache.tar.xz"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for wanted in (f"lmcache=={args.version}", *EXTRA):
            download(wanted, args.python, root)
        for library in (root / "lmcache").rglob("*.so"):
            if library.name.startswith(LEFT_OUT):
                library.unlink()
                continue
            if shutil.which("strip"):
                subprocess.run(["strip", "--strip-unneeded", str(library)], check=True)
            print(
                f"  {library.name}: kept {blank_other_chips(library) / 2**20:.1f} MiB of GPU code"
            )
        members = sorted(path.name for path in root.iterdir())
        pack = ["tar", "-C", str(root), "-I", "xz -T0 -6", "-cf", str(args.out), *members]
        subprocess.run(pack, check=True)
    print(f"{args.out}: {args.out.stat().st_size / 2**20:.1f} MiB")
