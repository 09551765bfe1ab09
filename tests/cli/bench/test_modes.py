"""Which modes can run here, and what their servers are started with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cli.bench import fake_vllm

from kvoffload_patch.cli.bench import modes


def test_a_connector_needs_a_release_that_has_it_and_a_gpu(tmp_path: Path) -> None:
    package = fake_vllm.write(tmp_path)
    for mode, title in ((modes.SIMPLE, "SimpleCPUOffloadConnector"),
                        (modes.OFFLOADING, "OffloadingConnector")):  # fmt: skip
        for vllm in (None, package):
            assert modes.unavailable(mode, vllm, True) == f"the installed vLLM has no {title}"
    fake_vllm.add_connectors(package)
    for mode in modes.TITLES:
        assert modes.unavailable(mode, package, True) == ""
    assert modes.unavailable(modes.SIMPLE, package, False).endswith("needs a GPU")
    assert modes.unavailable(modes.ON, None, False) == ""


def test_the_installed_vllm_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = fake_vllm.write(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(modes, "has_gpu", lambda: False)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    assert modes.installed() == (package, False)
    assert "vllm" not in sys.modules


def test_command_lines() -> None:
    serve = ["-m", "vllm.entrypoints.cli.main", "serve", "M", "--port", "1"]
    found = {mode: modes.command(mode, 2.5, "M", ["--port", "1"])[1:] for mode in modes.TITLES}
    assert found[modes.OFF] == serve
    assert found[modes.ON] == ["-m", "kvoffload_patch", sys.executable, *serve]
    assert found[modes.SIMPLE] == found[modes.OFFLOADING]
    assert found[modes.SIMPLE][: len(serve)] == serve
    assert found[modes.SIMPLE][len(serve) :][:2] == ["--kv-offloading-size", "2.5"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="-m always looks in the current folder")
@pytest.mark.parametrize("looks_here", [False, True])
def test_a_server_is_of_the_vllm_that_this_process_finds(
    looks_here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout of vLLM is a folder with a vllm that is not built."""
    for name in ("installed", "here"):
        folder = tmp_path / name / "vllm/entrypoints/cli"
        folder.mkdir(parents=True)
        for package in (folder, *folder.parents[:2]):
            (package / "__init__.py").touch()
        (folder / "main.py").write_text(f"print({name!r})")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", ["" if looks_here else "/bin", str(tmp_path / "installed")])
    environ = modes.environment(modes.OFF, 2.5, {"PYTHONPATH": str(tmp_path / "installed")})
    command = [sys.executable, *modes.command(modes.OFF, 2.5, "M", [])[1:]]
    said = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True).stdout
    assert said == ("here\n" if looks_here else "installed\n")


def test_only_its_own_mode_gets_what_switches_a_tier_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [""])
    user = {
        "HOME": "/h", "KVOFFLOAD_ENABLE": "1", "KVOFFLOAD_EVICTION": "lru",
        "VLLM_USE_SIMPLE_KV_OFFLOAD": "1",
    }  # fmt: skip
    found = {mode: modes.environment(mode, 2.5, user) for mode in modes.TITLES}
    plain = {"HOME": "/h", "KVOFFLOAD_DISABLE": "1"}
    assert found[modes.OFF] == found[modes.OFFLOADING] == plain
    assert found[modes.SIMPLE] == {**plain, "VLLM_USE_SIMPLE_KV_OFFLOAD": "1"}
    assert found[modes.ON] == {
        "HOME": "/h", "KVOFFLOAD_EVICTION": "lru", "KVOFFLOAD_CPU_GIB": "2.5",
    }  # fmt: skip
