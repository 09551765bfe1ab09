"""A bare virtual environment with a ten-line `vllm` and this package: ways to switch the tier on.

The package's own modules are copied; what decides and patches (`integration`, `patching`) is
replaced by a few lines that write down each call, so that these tests need no vLLM and see exactly
what they do. FAKE_ARM chooses what `arm` does: ok, refuse or bug; FAKE_REFUSAL is what an import
was refused with since.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
from pathlib import Path

import wrapt

ROOT = Path(__file__).resolve().parent.parent
REFUSAL = "vLLM 9.9.1 is not supported (supported: >=9.0,<9.9)."

ENGINE = """\
class Engine:
    def step(self):
        return "plain"

ORIGINAL = Engine.step
"""

ERRORS = """\
class PatchRefused(Exception): pass
"""

INSTALL = f"""\
import os
import wrapt
from kvoffload_patch.patching.errors import PatchRefused

def patch(module):
    module.Engine.step = lambda self: "patched"

def arm():
    with open(os.environ["ARM_LOG"], "a") as log:
        log.write(f"{{os.getpid()}}\\n")
    outcome = os.environ.get("FAKE_ARM", "ok")
    if outcome == "refuse":
        raise PatchRefused({REFUSAL!r})
    if outcome == "bug":
        raise KeyError("surprise")
    wrapt.register_post_import_hook(patch, "vllm.engine")

def refusal():
    return os.environ.get("FAKE_REFUSAL", "")

def describe(settings=None):
    points = [dict(name="engine.step", module="vllm.engine", attribute="Engine.step"),
              dict(name="other", module="vllm.other", attribute="Other.stop")]
    verdict = {REFUSAL!r} if os.environ.get("FAKE_ARM") == "refuse" else "ok"
    return dict(release="9.9.1", supported=">=9.0,<9.9", points=points, verdict=verdict)
"""


class Sandbox:
    """The environment; `run` starts its Python with nothing but the variables given."""

    def __init__(self, root: Path, vllm: bool = True, startup_file: bool = True) -> None:
        venv.EnvBuilder(symlinks=True, with_pip=False).create(root)
        self.root = root
        self.bin = root / "bin"
        self.python = self.bin / "python"
        (self.site,) = root.glob("lib/python*/site-packages")
        self.arm_log = root / "armed.txt"
        self._add_package()
        (self.site / "wrapt").symlink_to(Path(wrapt.__file__).parent)
        if startup_file:
            shutil.copy(ROOT / "kvoffload_patch.pth", self.site)
        if vllm:
            self._add_vllm()

    def _add_package(self) -> None:
        self.package = self.site / "kvoffload_patch"
        own = ["__init__", "__main__", "_bootstrap", "config", "launch_token", "memory"]
        own += ["policy_names"]
        self.package.mkdir()
        for name in own:
            shutil.copy(ROOT / f"kvoffload_patch/{name}.py", self.package)
        for name in ("cli", "control", "_sitecustomize"):
            shutil.copytree(ROOT / "kvoffload_patch" / name, self.package / name)
        for name, text in (("integration/install.py", INSTALL), ("patching/errors.py", ERRORS)):
            self.write(self.package / name, text)
            self.write((self.package / name).with_name("__init__.py"), "")

    def _add_vllm(self) -> None:
        self.write(self.site / "vllm/__init__.py", "")
        self.write(self.site / "vllm/engine.py", ENGINE)
        metadata = "Metadata-Version: 2.1\nName: vllm\nVersion: 9.9.1\n"
        self.write(self.site / "vllm-9.9.1.dist-info/METADATA", metadata)

    @staticmethod
    def write(path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def command(self, name: str, code: str) -> Path:
        """A script beside the environment's Python, as pip makes them for entry points."""
        path = self.write(self.bin / name, f"#!{self.python}\n{code}")
        path.chmod(0o755)
        return path

    def run(self, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
        """`python ARGUMENTS` with a clean environment and `variables`."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVOFFLOAD", "PYTHON"))}
        environ = {**kept, "ARM_LOG": str(self.arm_log), **variables}
        return subprocess.run(
            [str(self.python), *map(str, arguments)],
            env=environ,
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def armed(self) -> list[int]:
        """The process id of each call of `arm` so far."""
        return (
            [int(line) for line in self.arm_log.read_text().split()]
            if self.arm_log.exists()
            else []
        )


def imported(importtime: str) -> set[str]:
    """The modules that `python -X importtime` lists on its standard error."""
    lines = [line for line in importtime.splitlines() if line.startswith("import time:")]
    return {line.rsplit("|", 1)[1].strip() for line in lines}
