"""The demo's server: what it is started with, what is shown, and what is said if it fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cli.bench import fake_vllm

from kvoffload_patch.cli.bench.errors import ServerFailed
from scripts.demo_app.server import Server
from scripts.demo_app.settings import settings


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only `vllm` on the path; it serves as far as a benchmark asks."""
    fake_vllm.write(tmp_path)
    file = tmp_path / "vllm-command" / "vllm"
    file.parent.mkdir()
    monkeypatch.setenv("PATH", str(file.parent))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    file.write_text(f"#!{sys.executable}\nimport vllm.entrypoints.cli.main\n")
    file.chmod(0o755)
    return file


def test_a_server_is_shown_and_its_counters_are_read(
    command: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Server(tmp_path / "model", settings(), False, tmp_path / "log") as server:
        assert server.counters() == {"prompt": 0, "cached": 0, "loaded": 0}
        assert server.get("/v1/models")
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"Server without the CPU tier: starting (log: {tmp_path / 'log'})"
    assert second.startswith("Server without the CPU tier: ready after ")
    assert f"serve {tmp_path / 'model'} --host 127.0.0.1" in (tmp_path / "log").read_text()
    with pytest.raises(ServerFailed, match="the server does not give its metrics"):
        server.counters()


def test_one_that_ends_says_its_last_lines(command: Path, tmp_path: Path) -> None:
    command.write_text(f"#!{sys.executable}\nraise SystemExit('no model')\n")
    server = Server(tmp_path / "model", settings(), False, tmp_path / "log")
    with pytest.raises(ServerFailed, match=r"ended with status 1 .*\n  no model"), server:
        pass
