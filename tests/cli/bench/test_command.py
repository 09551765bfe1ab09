"""`kvoffload bench` from its options to its exit status; its servers are a fake of vLLM's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cli.bench import fake_vllm
from cli.bench.test_server import is_running
from sandbox import ROOT

from kvoffload_patch.cli import main
from kvoffload_patch.cli.bench import command

QUICK = ["bench", "--model", "M", "--gpu-blocks", "4", "--history", "40", "--turns", "2"]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """vLLM is a fake without connectors, in children as well."""
    package = fake_vllm.write(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.delenv("KVOFFLOAD_CPU_GIB", raising=False)
    monkeypatch.delenv("KVOFFLOAD_OPTIONS", raising=False)
    monkeypatch.setattr(command.modes, "installed", lambda: (package, False))
    return package


def test_a_table(fake: Path, capsys: Any) -> None:
    assert main.main([*QUICK, "--modes", "off"]) == 0
    shown = capsys.readouterr()
    about, _, head, _, row = shown.out.splitlines()
    assert about.startswith("M, vLLM ") and ": 4 chats of 40 tokens, 2 turns" in about
    assert head.startswith("later turns") and row.split()[:3] == ["no", "tier", "29"]
    assert shown.err.splitlines() == ["no tier: starting", "no tier: 4 chats of 2 turns"]


def test_json_and_files(fake: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    argv = [*QUICK, "--modes", "off", "--chats", "3", "--out", str(out), "--json", "--", "--more"]
    assert main.main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["chats"] == 3 and found["gpu_tokens"] == 64
    assert found["modes"]["off"]["later"]["requests"] == 3
    assert json.loads((out / "bench.json").read_text()) == found
    assert (out / "bench.png").is_file() or "matplotlib" not in sys.modules
    told = (out / "off.log").read_text().splitlines()[0]
    assert told.endswith("--more") and "--max-model-len 168" in told


def test_a_server_that_does_not_start_is_one_mode(fake: Path, capsys: Any) -> None:
    assert main.main([*QUICK, "--modes", "off", "--", "--fail"]) == 1
    shown = capsys.readouterr()
    assert shown.err.splitlines()[-2] == "  no such model"
    assert "found failures of: no tier; their last" in shown.err.splitlines()[-1]
    assert "see to it first that plain `vllm serve` runs here" in shown.err.splitlines()[-1]
    assert "or leave them out by --modes" in command._failure(["simple"])
    assert "failed" in shown.out.splitlines()[-1]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--modes", "of"], "--modes is 'of', expected some of off, on, simple, offloading,"),
        (["--modes", "simple"], "--modes: the installed vLLM has no SimpleCPUOffloadConnector;"),
        (["--modes", "off", "--", "--port=1"], "expected no --port behind --, which bench sets"),
        (["--modes", "off", "--", "--num_gpu_blocks_override", "2"], "--num-gpu-blocks-override"),
        (["--modes", "off", "--cpu-gib", "1e9"], "--cpu-gib is '1e9', expected a number of GiB"),
        (["--modes", "on", "--cpu-gib", "60000"], "60000"),
        (["--modes", "off", "--out", "/dev/null/x"], "--out is '/dev/null/x', expected a folder "),
        (["--modes", "off", "--out", "/proc/self"], "--out is '/proc/self', expected a folder to"),
    ],
)
def test_refusals_are_one_sentence(argv: list[str], said: str, fake: Path, capsys: Any) -> None:
    before = dict(os.environ)
    try:
        assert main.main([*QUICK, *argv]) == 2
    finally:
        os.environ.clear()
        os.environ.update(before)
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert line.startswith("kvoffload_patch: ") and said in line and shown.out == ""


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--modes", "x"], "--modes is 'x', expected some of"),
        ([], "expected a tier to compare, found KVOFFLOAD_DISABLE set; take it out."),
    ],
)
def test_programs_are_told_why_nothing_is_measured(
    more: list[str], said: str, fake: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVOFFLOAD_CPU_GIB", "0.1")
    monkeypatch.setenv("KVOFFLOAD_DISABLE", "1")
    assert main.main([*QUICK, "--modes", "on", "--json", *more]) == 2
    shown = capsys.readouterr()
    error = json.loads(shown.out)["error"]
    assert error.startswith(said) and shown.err == f"kvoffload_patch: {error}\n"


@pytest.mark.parametrize("argv", [["--turns", "1"], ["--chats", "-1"], ["--seed", "1e3"], ["--x"]])
def test_wrong_numbers_are_refused_by_their_option(argv: list[str], capsys: Any) -> None:
    assert main.main([*QUICK, *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert argv[0] in line


def test_all_wrong_values_are_said_at_once(fake: Path, capsys: Any) -> None:
    wrong = ["--model", "/nope", "--chats", "-1", "--turns", "-3", "--out", "/dev/null/x"]
    before = dict(os.environ)
    try:
        assert main.main(["bench", *wrong, "--modes", "zzz", "--cpu-gib", "x", "--more"]) == 2
    finally:
        os.environ.clear()
        os.environ.update(before)
    (line,) = capsys.readouterr().err.splitlines()
    for option in ("--model", "--chats", "--turns", "--out", "--modes", "--cpu-gib", "--more"):
        assert f"{option} is " in line


@pytest.mark.parametrize("model", ["/nope", "./nope", "~/nope", "some/where/nope"])
def test_a_model_that_is_not_there_starts_no_server(model: str, fake: Path, capsys: Any) -> None:
    assert main.main(["bench", "--model", model, "--modes", "off"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    said = f"--model is {model!r}, expected a model that is there, found no such file or folder"
    assert said in line


def test_a_models_name_is_vllms_to_find(tmp_path: Path) -> None:
    for model in (
        "M",
        "owner/M",
        "s3://bucket/a/M",
        str(tmp_path),
        f"{tmp_path}/../{tmp_path.name}",
    ):
        assert not command._missing(model)


def test_modes_that_cannot_run_are_left_out(fake: Path, capsys: Any) -> None:
    assert command._chosen(None) == ["off", "on"]
    assert "left out: the installed vLLM has no OffloadingConnector." in capsys.readouterr().err
    fake_vllm.add_connectors(fake)
    assert command._chosen(None) == ["off", "on"]
    assert "left out: OffloadingConnector needs a GPU." in capsys.readouterr().err


def test_without_vllm_that_is_all_that_is_said(
    fake: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.modes, "installed", lambda: (None, False))
    assert command._chosen(None) == ["off", "on"]
    assert capsys.readouterr().err == ""


def test_help_has_examples(capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(["bench", "--help"])
    shown = capsys.readouterr().out
    assert caught.value.code == 0
    assert "examples:" in shown and "exit status: 0 measured" in shown


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_first(number: int, fake: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = [*QUICK, "--modes", "off", "--out", str(out), "--chats", "100000"]
    path = f"{fake.parent}{os.pathsep}{ROOT}"
    process = subprocess.Popen(
        [sys.executable, "-m", "kvoffload_patch", *argv], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        # What a shell starts in the background ignores it, and so do the tests then.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        log, until = out / "off.log", time.monotonic() + 120
        while not (log.is_file() and "the fake is told" in log.read_text()):
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.05)
        (server,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(number)
        assert process.wait(120) == (130 if number == signal.SIGINT else 143)
        assert not is_running(int(server))
    finally:
        process.kill()
        process.wait()
