"""A ten-line host package with metadata, and a way to run code against it in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FILES = {
    "fakehost/__init__.py": "",
    "fakehost/alpha.py": """
class Base:
    def inherited(self, x): return x
class Engine(Base):
    def step(self, request, count=1) -> "tuple[int, str]": return (request, count)
    def make(self, x) -> list[int]: return [x]
    @staticmethod
    def static(x): return x
    @classmethod
    def built(cls, x): return [x]
    async def later(self, x): return x
ORIGINALS = dict(vars(Engine))
""",
    "fakehost/beta.py": """
class Worker:
    def execute(self, batch, *, flag=False): return batch
ORIGINALS = dict(vars(Worker))
""",
    "hooks.py": """
calls = []
def mark(wrapped, instance, args, kwargs):
    calls.append((wrapped.__name__, instance, args, kwargs))
    return ("hooked", wrapped(*args, **kwargs))
def fail(wrapped, instance, args, kwargs):
    raise LookupError("from the hook")
""",
    "harness.py": """
import sys
from kvoffload_patch.patching import *

HOST = Host("FakeHost", ("nothing-like-it", "fakehost-cpu"), "fakehost", ">=1.0,<2", "use 1.x")

def point(name, attribute, parameters, returns=None, hook="hooks:mark", versions=">=1.0,<2"):
    module, _, path = attribute.partition(":")
    names = tuple(parameters.split())
    return PatchPoint(name, module, path, hook, versions, names, returns, "Test.")

STEP = point("scheduler.step", "fakehost.alpha:Engine.step", "self request", ("tuple[int, str]",))
EXECUTE = point("worker.execute", "fakehost.beta:Worker.execute", "self batch")
INHERITED = point("scheduler.inherited", "fakehost.alpha:Engine.inherited", "self x")
MAKE = point("scheduler.make", "fakehost.alpha:Engine.make", "self x", ("list[int]",))

def patches(*points, **options):
    return PatchSet(decide(HOST, points or (STEP, EXECUTE), installed_version(HOST), **options))

def refused(kind, function, *args):
    try:
        function(*args)
    except kind as error:
        assert type(error) is kind, repr(error)
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")

def load(name):
    import importlib
    return importlib.import_module(name)

def installed(patch_set):
    return set(patch_set.status()["installed"])
""",
}


class FakeHost:
    """The host package in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.set_version("1.2.3")
        for name, text in FILES.items():
            self.write(name, text)

    def set_version(self, version: str) -> None:
        name = "fakehost_cpu-0.dist-info/METADATA"
        self.write(name, f"Metadata-Version: 2.1\nName: fakehost-cpu\nVersion: {version}\n")

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def replace(self, name: str, old: str, new: str) -> None:
        text = (self.folder / name).read_text()
        assert old in text
        self.write(name, text.replace(old, new))

    def run(self, code: str) -> str:
        """Run `code` after `from harness import *` in a fresh interpreter; give its output."""
        self.write("scenario.py", "from harness import *\n" + textwrap.dedent(code))
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVOFFLOAD_")}
        inherited = environment.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join([str(self.folder), str(ROOT), inherited])
        environment["PYTHONDONTWRITEBYTECODE"] = "1"  # files rewritten within a second stay seen
        done = subprocess.run(
            [sys.executable, str(self.folder / "scenario.py")],
            env=environment,
            capture_output=True,
            text=True,
            timeout=50,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path)
