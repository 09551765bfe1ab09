"""Packages that vLLM is used with, installed to be tested beside: in a folder, not the environment.

They bring nothing along: what they require would replace packages of the environment, or is for
GPUs, and the CPU gets on without it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from scripts import ROOT

FOLDER = ROOT / ".neighbours"
# By the name that a row of `features_rows` gives.
PACKAGES = {
    "NIXL": ("nixl==1.5.1", "nixl-cu12==1.5.1", "nixl-cu13==1.5.1"),
    "Ray": ("ray==2.60.0", "msgpack==1.2.4"),
}


def environment(
    names: Iterable[str], python: Path, env: Mapping[str, str] | None
) -> dict[str, str]:
    """The variables with which a Python finds these, installed now if they are not there.

    Args:
        names: of `PACKAGES`.
        env: variables so far; None: those of this process.
    """
    found = dict(os.environ if env is None else env)
    folders = [str(_installed(name, python)) for name in sorted(set(names))]
    before = [found["PYTHONPATH"]] if found.get("PYTHONPATH") else []
    return {**found, "PYTHONPATH": os.pathsep.join([*before, *folders])} if folders else found


def _installed(name: str, python: Path) -> Path:
    folder = FOLDER / "-".join(PACKAGES[name]).replace("==", "-")
    if not folder.exists():
        made = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(made, ignore_errors=True)
        install = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", str(made)]
        subprocess.run([str(python), *install, *PACKAGES[name]], check=True)
        made.rename(folder)
    return folder
