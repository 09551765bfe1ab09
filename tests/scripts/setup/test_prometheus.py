"""How scripts/test comes by Prometheus, with commands made here in the place of Debian's."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts import ROOT

SCRIPT = ROOT / "scripts/setup/prometheus.sh"
BASH = shutil.which("bash") or ""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder with an empty environment, and commands of which none reaches the network."""
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    for name in ("mktemp", "rm", "touch", "install", "mkdir"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or "")
    return tmp_path


def command(machine: Path, name: str, does: str) -> None:
    file = machine / "bin" / name
    file.write_text(f"#!{BASH}\n{does}\n")
    file.chmod(0o755)


def said(machine: Path) -> str:
    """What it prints."""
    return subprocess.run(
        [BASH, "-euo", "pipefail", str(SCRIPT)],
        env={"PATH": f"{machine}/bin", "VENV": f"{machine}/venv", "TMPDIR": str(machine)},
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip


def test_it_is_taken_out_of_the_package_once(machine: Path) -> None:
    command(machine, "apt-get", f"echo >> {machine}/fetched; echo > prometheus_2_amd64.deb")
    command(machine, "dpkg-deb", "mkdir -p usr/bin; echo it > usr/bin/prometheus")
    assert "in " + str(machine / "venv/bin") in said(machine)
    assert os.access(machine / "venv/bin/prometheus", os.X_OK)
    assert said(machine) == "" and (machine / "fetched").read_text() == "\n"
    assert {file.name for file in machine.iterdir()} == {"bin", "venv", "fetched"}


@pytest.mark.parametrize("fails", ["exit 100", None], ids=["no network", "no Debian"])
def test_without_a_package_it_is_said_once_and_is_no_error(
    machine: Path, fails: str | None
) -> None:
    if fails:
        command(machine, "apt-get", fails)
    assert "its tests are skipped" in said(machine) and said(machine) == ""


def test_one_that_is_installed_is_taken(machine: Path) -> None:
    command(machine, "prometheus", "")
    command(machine, "apt-get", "exit 1")
    assert said(machine) == "" and not (machine / "venv/.prometheus-tried").exists()
