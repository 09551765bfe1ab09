"""What a command cannot use is refused in one sentence before it does anything."""

from __future__ import annotations

import importlib
import sys
from argparse import ArgumentTypeError
from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts.bench import arguments

WHOLE = "expected a whole number of 1 or more, found '0'"
ABOVE = "expected a finite number above 0, found"
TWO = "expected a whole number of 2 or more, found"
REFUSED = [
    ("bench.step", "--only zz", "argument --only: expected some of a,b1k,b10k,c,"),
    ("bench.step", "--only a, --quick", "e-full,f,g, found ''"),
    ("bench.step", "--sides nosuch", "argument --sides: expected some of plain,"),
    ("bench.step", "--rounds 1", f"argument --rounds: {TWO} '1'"),
    ("bench.step", "--only a --rounds 0 --quick", f"argument --rounds: {TWO} '0'"),
    ("bench.step", "--json .", "argument --json: expected a file or the name of a new one, found"),
    ("bench.probes.copy_thread", "--steps 0", f"argument --steps: {WHOLE}"),
    ("bench.probes.copy_thread", "--turns 0", f"argument --turns: {WHOLE}"),
    ("bench.probes.modelled", "--seeds 0", f"argument --seeds: {WHOLE}"),
    ("bench.probes.touch", "--gib 0", f"argument --gib: {ABOVE} '0'"),
    ("bench.probes.touch", "--threads 2,0", f"argument --threads: {WHOLE}"),
    ("bench.probes.trace", "--read none", "argument --read: expected a file that is there, found"),
    ("bench.transfer.command", "--gib 0", f"argument --gib: {ABOVE} '0'"),
    ("bench.transfer.command", "--rounds 0", f"argument --rounds: {WHOLE}"),
    ("bench.transfer.command", "--backends no", "--backends: expected some of "),
    ("bench.transfer.command", "--orders no", "--orders: expected some of "),
    ("bench.transfer.command", "--integrity no", "--integrity: expected some of off, sample, full"),
    ("soak.page", "none.json", "expected a file that is there, found 'none.json'"),
    ("simulate.replay", "chat --running 0", f"argument --running: {WHOLE}"),
    ("simulate.replay", "chat --step-tokens 0", f"argument --step-tokens: {WHOLE}"),
    ("simulate.replay", "chat --block-tokens 0", f"argument --block-tokens: {WHOLE}"),
    ("simulate.replay", "chat --prefill 0", f"argument --prefill: {ABOVE} '0'"),
    ("simulate.replay", "chat --load-gbs nan", f"argument --load-gbs: {ABOVE} 'nan'"),
    ("simulate.replay", "chat --seconds 0", f"argument --seconds: {ABOVE} '0'"),
    ("simulate.replay", "chat --seconds=-1", f"argument --seconds: {ABOVE} '-1'"),
    (
        "simulate.replay",
        "chat --seconds 0.001",
        "chat: expected requests in 0.001 seconds, found none",
    ),
    ("simulate.measure", "--seconds inf", f"argument --seconds: {ABOVE} 'inf'"),
    ("simulate.growth", "--seconds x", f"argument --seconds: {ABOVE} 'x'"),
    (
        "simulate.generate",
        "chat none/out",
        "expected a file in a folder that is there, found no such",
    ),
    ("simulate.generate", "chat .", "expected a file in a folder that is there, found a folder: ."),
    (
        "simulate.scale",
        "--slots 0",
        "argument --slots: expected a whole number of 100 or more, found '0'",
    ),
    (
        "simulate.scale",
        "--out none/out",
        "expected a file in a folder that is there, found no such",
    ),
]


@pytest.mark.parametrize(("command", "given", "says"), REFUSED)
def test_what_cannot_be_used_is_refused_in_one_sentence(
    command: str,
    given: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if command.startswith(("bench.probes", "bench.transfer")) and find_spec("vllm") is None:
        pytest.skip("it needs what comes with vLLM")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [command, *given.split()])
    main = importlib.import_module(f"scripts.{command}").main
    try:
        status = main()
    except SystemExit as refused:
        status = refused.code
    assert status == 2
    assert says in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_what_can_be_used_is_parsed(tmp_path: Path) -> None:
    assert arguments.whole(3)("3") == 3
    assert arguments.positive("1e-3") == 0.001
    assert arguments.target(str(tmp_path / "new")) == tmp_path / "new"
    (tmp_path / "old").touch()
    assert arguments.target(str(tmp_path / "old")) == tmp_path / "old", "it is written again"
    assert arguments.written(str(tmp_path / "no/such")) == tmp_path / "no/such", "it is made"
    assert arguments.some("abc")("c,a") == ["c", "a"]


def test_what_is_to_be_written_is_not_a_folder_or_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    assert arguments.written(str(tmp_path / "old")) == tmp_path / "old"
    for wrong in (tmp_path, tmp_path / "old/new", tmp_path / "old/no/new"):
        with pytest.raises(ArgumentTypeError, match="expected a file or the name of a new one"):
            arguments.written(str(wrong))
