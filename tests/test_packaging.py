"""What is built and installed: wheel, editable wheel and source archive, in a fresh environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox import ROOT

import kvoffload_patch

pytest.importorskip("setuptools", minversion="70.1")  # the first that builds wheels by itself

PTH = "kvoffload_patch.pth"
STARTED = "import sys; print('kvoffload_patch._bootstrap' in sys.modules)"
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])('dist')"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, so that the checkout stays clean."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("setup.py", "setup.cfg", "pyproject.toml", PTH, "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder)
    cached = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "kvoffload_patch", folder / "kvoffload_patch", ignore=cached)
    (folder / "tests").mkdir()
    (folder / "tests/__init__.py").touch()  # must not be taken for a package to ship
    return folder


def build(source: Path, what: str) -> Path:
    dist = source / "dist"
    before = set(dist.glob("*"))
    dist.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, what], cwd=source, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (built,) = set(dist.glob("*")) - before
    return built


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    return build(source, "build_wheel")


@pytest.fixture(scope="module")
def editable(source: Path) -> Path:
    return build(source, "build_editable")


class Fresh:
    """A new virtual environment; pip works in it without a network."""

    def __init__(self, root: Path) -> None:
        venv.EnvBuilder(symlinks=True, with_pip=True).create(root)
        self.root = root
        self.before = self.files()

    def files(self) -> set[Path]:
        found = self.root.rglob("*")
        return {p.relative_to(self.root) for p in found if "__pycache__" not in p.parts}

    def run(self, *arguments: object, **variables: str) -> str:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVOFFLOAD", "PYTHON"))}
        command = [str(self.root / "bin/python"), *map(str, arguments)]
        done = subprocess.run(
            command, env={**kept, **variables}, cwd=self.root, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def pip(self, *arguments: object) -> str:
        return self.run("-m", "pip", "-q", "--disable-pip-version-check", *arguments)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    return Fresh(tmp_path_factory.mktemp("fresh"))


@pytest.fixture(scope="module", params=["wheel", "editable"])
def installed(request: pytest.FixtureRequest, fresh: Fresh) -> Iterator[Fresh]:
    """The environment with the package installed; afterwards nothing of it may be left."""
    fresh.pip("install", "--no-deps", "--no-index", request.getfixturevalue(request.param))
    assert fresh.files() > fresh.before
    yield fresh
    fresh.pip("uninstall", "-y", "kvoffload_patch")
    assert fresh.files() == fresh.before


def test_startup_file_is_executed(installed: Fresh) -> None:
    assert installed.run("-c", STARTED, KVOFFLOAD_ENABLE="1") == "True\n"
    assert installed.run("-c", STARTED, KVOFFLOAD_ENABLE="off") == "False\n"
    assert installed.run("-c", STARTED) == "False\n"
    assert installed.run("-I", "-c", STARTED, KVOFFLOAD_ENABLE="1") == "True\n"
    assert installed.run("-S", "-c", STARTED, KVOFFLOAD_ENABLE="1") == "False\n"


def test_metadata(installed: Fresh) -> None:
    code = """if 1:
        from importlib import metadata
        print(metadata.version("kvoffload_patch"))
        print(sorted(r for r in metadata.requires("kvoffload_patch") if "extra" not in r))
        points = metadata.distribution("kvoffload_patch").entry_points
        print(sorted((p.group, p.name, p.load().__name__) for p in points))"""
    version, requires, points = installed.run("-c", code).splitlines()
    assert version == kvoffload_patch.__version__
    assert requires == "['packaging>=21', 'wrapt>=1.15']"
    command, plugin = ("console_scripts", "kvoffload", "main"), ("kvoffload", "plugin")
    assert points == f"{[command, ('vllm.general_plugins', *plugin)]}"


def test_classifiers_name_the_pythons_that_were_tested() -> None:
    """By `scripts/matrix pythons`, which tests the source archive with each."""
    found = json.loads((ROOT / "docs/measured/pythons.json").read_text())
    tested = {name for name, one in found.items() if one["green"]}
    text = (ROOT / "setup.cfg").read_text()  # in a source archive its lines begin with tabs
    listed = re.findall(r"^\s+Programming Language :: Python :: (3\.\d+)$", text, re.MULTILINE)
    assert len(tested) > 2 and set(listed) == tested
    assert {one["pip_check"] for one in found.values()} == {"No broken requirements found."}


def test_command_line_runs(installed: Fresh) -> None:
    version = f"kvoffload_patch {kvoffload_patch.__version__}\n"
    assert installed.run("-m", "kvoffload_patch", "--version") == version
    assert installed.run(installed.root / "bin/kvoffload", "--version") == version


def test_wheel_holds_every_module_and_nothing_else(source: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
    package = source / "kvoffload_patch"
    modules = {p.relative_to(source).as_posix() for p in package.rglob("*.py")}
    patches = {f"kvoffload_patch/patches/{p.name}" for p in (ROOT / "patches").glob("*.patch")}
    digests = "kvoffload_patch/integration/patch_table/digests"
    data = {f"{digests}/vllm.json", f"{digests}/vllm_ascend.json"}
    assert names == modules | patches | data | {PTH, "kvoffload_patch/py.typed"}
    assert patches
    assert "kvoffload_patch/_sitecustomize/sitecustomize.py" in names
    assert "kvoffload_patch/cli/main.py" in names


def test_wheel_carries_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("LICENSE"))
        text = archive.read(name).decode()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text


def test_editable_wheel_points_at_the_source(editable: Path) -> None:
    with zipfile.ZipFile(editable) as archive:
        names = archive.namelist()
        assert PTH in names
        assert archive.read(PTH) == (ROOT / PTH).read_bytes()
    assert not [n for n in names if n.startswith("kvoffload_patch/")]


# What a checkout has and nobody ships.
NOT_SHIPPED = shutil.ignore_patterns(
    ".git", ".venv*", ".kit", ".neighbours", ".vllm-sources", ".*_cache", ".hypothesis",
    "__pycache__", "*.egg-info", "build", "dist", "*-out",
)  # fmt: skip


def test_source_archive_has_all_that_the_repository_has(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=NOT_SHIPPED)
    wanted = {
        str(path.relative_to(checkout))
        for path in checkout.rglob("*")
        if path.is_file() and "kvoffload_patch/patches" not in str(path)
    }
    with tarfile.open(build(checkout, "build_sdist")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        executable = {
            member.name.partition("/")[2] for member in archive.getmembers() if member.mode & 0o100
        }
    assert wanted - names == set()
    assert {PTH, "LICENSE", ".ci/run", "kvoffload_patch/py.typed"} <= names
    assert {"scripts/test", "scripts/demo", ".ci/run"} <= executable
