"""What a command cannot use is refused in one sentence before it does anything."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from scripts.simulate import arguments

WHOLE = "expected a whole number of 1 or more, found '0'"
ABOVE = "expected a finite number above 0, found"
REFUSED = [
    ("replay", "chat --running 0", f"argument --running: {WHOLE}"),
    ("replay", "chat --step-tokens 0", f"argument --step-tokens: {WHOLE}"),
    ("replay", "chat --block-tokens 0", f"argument --block-tokens: {WHOLE}"),
    ("replay", "chat --prefill 0", f"argument --prefill: {ABOVE} '0'"),
    ("replay", "chat --load-gbs nan", f"argument --load-gbs: {ABOVE} 'nan'"),
    ("replay", "chat --seconds 0", f"argument --seconds: {ABOVE} '0'"),
    ("replay", "chat --seconds=-1", f"argument --seconds: {ABOVE} '-1'"),
    ("replay", "chat --seconds 0.001", "chat: expected requests in 0.001 seconds, found none"),
    ("measure", "--seconds inf", f"argument --seconds: {ABOVE} 'inf'"),
    ("growth", "--seconds x", f"argument --seconds: {ABOVE} 'x'"),
    ("generate", "chat none/out", "expected a file in a folder that is there, found no such"),
    ("generate", "chat .", "expected a file in a folder that is there, found a folder: ."),
    ("scale", "--slots 0", "argument --slots: expected a whole number of 100 or more, found '0'"),
    ("scale", "--out none/out", "expected a file in a folder that is there, found no such"),
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
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [command, *given.split()])
    main = importlib.import_module(f"scripts.simulate.{command}").main
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
