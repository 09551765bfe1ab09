"""The demonstration turns what goes wrong into a sentence."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai")

from scripts.demo_app import __main__ as demo_app


def test_a_folder_that_cannot_be_written_to_is_a_sentence(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo-out").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["demo"])
    monkeypatch.setattr(demo_app.signal, "signal", lambda *_: None)
    assert demo_app.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "error: demo-out: File exists (all that this writes goes to demo-out)."
