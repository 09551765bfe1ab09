"""A child process that answers, fails, or does neither."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvoffload_patch.cli.doctor.child import MARK, answer, ask


def test_the_last_answer_is_taken_among_other_output() -> None:
    say = f"print({MARK!r} + json.dumps(dict(a=int(os.environ['B']))))"
    code = rf"import json, os; os.write(1, b'noise\xff\n'); {say}; print(1)"
    assert ask(code, 60, B="7") == {"a": 7}


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise KeyError('x')", "KeyError: 'x'"),
        ("import sys; sys.exit('kvoffload_patch: no.\\nlast')", "kvoffload_patch: no."),
        (r"import os; os.write(2, b'\xff\x1b[1m.\n'); os._exit(1)", "\ufffd\\x1b[1m."),
        ("import sys; sys.exit(3)", "exit status 3 and no answer"),
    ],
)
def test_why_there_is_no_answer(code: str, error: str) -> None:
    assert ask(code, 60) == {"error": error}


def test_a_child_that_does_not_end_is_ended() -> None:
    assert ask("import time; time.sleep(60)", 0.2) == {
        "error": "TimeoutExpired: no answer within 0 s"
    }


def test_a_child_that_cannot_be_started_is_not_said_to_be_silent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert ask("", 60)["error"].startswith("FileNotFoundError: [Errno 2] No such file")


def test_what_is_no_text_hides_no_answer() -> None:
    code = f"import sys; sys.stdout.buffer.write(b'\\xff\\n' + {MARK!r}.encode() + b'{{}}')"
    assert ask(code, 60) == {}


def test_a_child_finds_what_this_process_finds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And nothing of the current folder, which may be a clone of vLLM's repository."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"only_{name}.py").touch()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(tmp_path / "there")
    found = "{n: importlib.util.find_spec(n) is not None for n in ('only_here', 'only_there')}"
    code = f"import importlib.util, json; print({MARK!r} + json.dumps({found}))"
    assert ask(code, 60) == {"only_here": False, "only_there": True}


def test_an_answer_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    answer({"a": "x\ny"})
    assert capsys.readouterr().out == MARK + '{"a": "x\\ny"}\n'
