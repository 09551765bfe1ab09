"""What a command cannot use is refused in one sentence before it does anything."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts import dispatch
from scripts.bench import arguments

WHOLE = "expected a whole number of 1 or more, found '0'"
ABOVE = "expected a finite number above 0, found"
TWO = "expected a whole number of 2 or more, found"
THERE = "expected a folder that is there, found"
MODEL = "expected a folder with a model's config.json, found 'folder'"
TO_WRITE = "expected a folder to write to or a new one, found 'list.json'"
OBJECT = "expected a JSON object such as"
RELEASE = "expected a release such as 0.32.0, found 'nosuch'"
OUT = "argument RELEASE: expected releases out of"
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
    ("bench.serve.command", "--rounds 0", f"argument --rounds: {WHOLE}"),
    ("bench.serve.command", "--model none", f"argument --model: {THERE} 'none'"),
    ("bench.serve.command", "--model folder", f"argument --model: {MODEL}"),
    ("bench.serve.command", "--engine 3", f"argument --engine: {OBJECT}"),
    ("bench.serve.command", "--engine x", f"argument --engine: {OBJECT}"),
    ("bench.serve.command", "--out list.json", f"argument --out: {TO_WRITE}"),
    (
        "bench.serve.command",
        "--modes= --set gpu_blocks=x",
        "error: --set gpu_blocks=x: expected a whole number",
    ),
    ("bench.serve.command", "--modes nosuch", "error: mode 'nosuch': expected one of off, ours,"),
    (
        "bench.serve.command",
        "--merge empty.json",
        "argument --merge: expected a file of a JSON object with machines, sizes, jobs, found",
    ),
    ("bench.serve.lmcache", "--out folder", "argument --out: expected a file in a folder that"),
    ("bench.chats.command", "--merge list.json", "expected a file of a JSON object with machines,"),
    ("bench.chats.command", "--merge served.json", "machines, jobs, each of jobs with load, found"),
    ("bench.chats.command", "--gpus ٢x", "argument --gpus: expected a whole number of 1 or more,"),
    ("bench.probes.long", "--modes nosuch", "argument --modes: expected some of ours,simple,"),
    ("bench.probes.long", "--model none", f"argument --model: {THERE} 'none'"),
    ("bench.probes.long", "", "expected --model DIR, found none"),
    ("bench.probes.long", "--lengths 0", f"argument --lengths: {WHOLE}"),
    ("bench.probes.mechanisms", "--model folder", f"argument --model: {MODEL}"),
    ("bench.probes.mechanisms", "--only nosuch", "argument --only: expected some of "),
    ("bench.probes.mechanisms", "--parts nosuch", "argument --parts: expected some of turn,"),
    ("bench.probes.trace", "--small --only nosuch", "--only: expected some of "),
    (
        "bench.probes.trace",
        "--model folder",
        "--model: expected a folder with a config.json,",
    ),
    (
        "bench.probes.trace",
        "--read empty.json",
        "error: expected the events of a run in empty.json,",
    ),
    ("bench.probes.modelled", "--stall=-1", "argument --stall: expected a finite number of 0 or"),
    ("bench.transfer.command", "--block-kib x", "argument --block-kib: expected a whole number of"),
    ("matrix.engines", "nosuch", OUT),
    ("matrix.engines", "9.9.9", OUT),
    ("matrix.engines", "--work none", f"argument --work: {THERE} 'none'"),
    ("matrix.engines", "--jobs 0", f"argument --jobs: {WHOLE}"),
    ("matrix.pythons", "nosuch", "expected a Python on the PATH, found none for 'nosuch'"),
    (
        "matrix.pythons",
        "--out list.json",
        "argument --out: expected a file of a JSON object, found",
    ),
    ("matrix.random_runs", "nosuch", f"argument release: {RELEASE}"),
    ("matrix.random_runs", "--seconds nan", "argument --seconds: expected a finite number of 0 or"),
    ("matrix.random_engines", "--seconds=-1", "argument --seconds: expected a finite number of 0"),
    ("matrix.gpu", "--record none", "argument --record: expected a file that is there, found"),
    (
        "matrix.gpu",
        "--record empty.json",
        "argument --record: expected a file of a JSON object with kind, release, tests, found",
    ),
    ("matrix.gpu", "--out out --runners v3", "argument --runners: expected some of v1,v2, found"),
    ("matrix.scheduler", "nosuch", f"argument releases: {RELEASE}"),
    ("matrix.scheduler", "--json list.json", f"argument --json: {TO_WRITE}"),
    ("matrix.own", "nosuch", f"argument release: {RELEASE}"),
    (
        "matrix.features",
        "--select nosuch",
        "expected words that names of rows have, found 'nosuch'",
    ),
    ("matrix.features", "--release 9.9.9", "argument --release: expected releases out of "),
    ("release.add", "nosuch", f"argument X.Y.Z: {RELEASE}"),
    ("release.digests", "nosuch", f"argument X.Y.Z: {RELEASE}"),
    ("release.snapshot", "nosuch", f"argument X.Y.Z: {RELEASE}"),
    ("release.snapshot", "0.32.0 --sources none", f"argument --sources: {THERE} 'none'"),
    ("release.snapshot", "0.32.0 --wheel list.json", "error: expected a wheel at list.json, found"),
    ("release.sources", "nosuch", "error: 'nosuch' is not a release such as 0.32.0; give its ver"),
    ("release.patches", "nosuch", "error: expected a release such as 0.32.0, found 'nosuch'; give"),
    ("release.patches", "--into none", f"argument --into: {THERE} 'none'"),
    ("release.patches", "0.32.0 --sources folder", "error: expected files and folders that can be"),
    ("release.ascend", "none", f"argument CLONE: {THERE} 'none'"),
    (
        "release.ascend",
        "folder",
        "error: expected a git clone of vllm-ascend in folder, found fatal",
    ),
    ("soak.run", "--users 0", f"argument --users: {WHOLE}"),
    ("soak.run", "--minutes=-1", f"argument --minutes: {ABOVE} '-1'"),
    ("soak.signals", "--minutes nan", f"argument --minutes: {ABOVE} 'nan'"),
    ("soak.page", "list.json", "expected a file of a JSON object with machine, found 'list.json'"),
    ("simulate.replay", "none.jsonl", "error: none.jsonl: expected a trace, found No such file or"),
    ("simulate.public", "list.json", "error: list.json: expected the conversation trace (SHA-256"),
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
    (tmp_path / "folder").mkdir()
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "served.json").write_text('{"machines": [], "jobs": [{"mode": "ours"}]}')
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(sys, "argv", ["scripts", "it", *given.split()])
    folder, _, module = command.partition(".")
    try:
        status = dispatch(folder, "", {"it": (module, "it")})
    except SystemExit as refused:
        status = refused.code
    assert status == 2
    assert says in capsys.readouterr().err.splitlines()[-1]
    assert sorted(tmp_path.rglob("*")) == before


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
