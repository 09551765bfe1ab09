"""What is wrong on any command line: one line, all of it, what was expected and what to do."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from kvoffload_patch.cli import main
from kvoffload_patch.cli.options import Parser, whole

COMMANDS = (
    "doctor",
    "status",
    "top",
    "bench",
    "patch",
    "pause",
    "resume",
    "empty",
    "resize",
    "set",
)


def refused(argv: list[str], capsys: Any) -> str:
    status: Any
    try:
        status = main.main(argv)
    except SystemExit as ended:
        status = ended.code
    shown = capsys.readouterr()
    *_, line = shown.err.splitlines()
    assert status == 2
    if "--json" in argv:
        assert json.loads(shown.out) == {"error": line.removeprefix("kvoffload_patch: ")}
    else:
        assert shown.out == ""
    assert line.startswith("kvoffload_patch: ") and line.endswith("."), line
    return line


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--cpu-gb", "4", "vllm"], ["--cpu-gb is not an option of kvoffload", "one is --cpu-gib"]),
        (["--eviction", "lru", "vllm"],
         ["--eviction is not an option of kvoffload, but a variable", "set KVOFFLOAD_EVICTION in"]),
        (["--options", "x"], ["--options is not an option of kvoffload, the closest"]),
        (["--cpu-gib", "--check"], ["--cpu-gib has no value, expected one"]),
        (["--cpu-gib", "", "--load-mode", "", "vllm"],
         ["--cpu-gib and --load-mode: expected a value, found an empty one"]),
        ([], ["expected a COMMAND to run, found none"]),
        (["--json", "status"], ["expected --json beside --check or behind a command"]),
        (["doctor", "--jsn", "now"],
         ["--jsn is not an option", "the closest one is --json", "now is not an argument"]),
        (["top", "--interval", "0", "--x=1"],
         ["--interval is '0', expected 0.1 to 3600 seconds", "--x is not an option"]),
        (["top", "--once=1"], ["--once is '1', expected no value"]),
        (["pause", "--json", "--engin", "1"], ["--engin is not an option", "one is --engine"]),
        (["bench", "--turns", "1", "--seed", "1e3"],
         ["--turns is '1', expected a whole number from 2 to 1000", "--seed is '1e3'",
          "expected --model, found none"]),
        (["bench", "--model", "m", "--chats", "٣"], ["--chats is '٣', expected a whole number"]),
        (["bench", "--modl", "x"],
         ["--modl is not an option", "closest one is --model", "expected --model, found none"]),
        (["patch", "--foo"], ["--foo is not an option", "expected one of --apply"]),
        (["patch"], ["expected one of --apply --revert --check, found none"]),
        (["patch", "--apply", "--revert"], ["expected --apply or --revert, found both"]),
        (["resize"], ["expected GIB, found none"]),
        (["set", "--store", "lazy"], ["in the environment in which vLLM starts."]),
    ],
)  # fmt: skip
def test_all_that_is_wrong_is_one_line(argv: list[str], said: list[str], capsys: Any) -> None:
    line = refused(argv, capsys)
    assert [words for words in said if words not in line] == []
    assert line.count("kvoffload_patch: ") == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example_and_json(name: str, capsys: Any) -> None:
    assert set(COMMANDS) == set(main._OWN)
    with pytest.raises(SystemExit) as ended:
        main.main([name, "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and "--json" in text
    assert f"kvoffload {name}" in text.partition("example")[2]
    assert "exit status: " in text


def test_no_command_has_a_parser_of_its_own() -> None:
    """So that a refusal is the same everywhere."""
    files = Path(main.__file__).parent.rglob("*.py")
    assert [file.name for file in files if "ArgumentParser" in file.read_text()] == ["options.py"]


def test_values_are_read_and_a_second_look_forgets_the_first(capsys: Any) -> None:
    parser = Parser("p", "d", "e")
    parser.add_value("--count", *whole(1, 9), default=3)
    assert parser.parse_args([]).count == 3
    with pytest.raises(SystemExit):
        parser.parse_args(["--count", "10"])
    assert "--count is '10', expected a whole number from 1 to 9; correct it." in (
        capsys.readouterr().err
    )
    assert parser.parse_args(["--count", "9"]) == argparse.Namespace(count=9)


def test_words_that_argparse_does_not_share_are_said_as_they_are(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        Parser("p", "d", "e").error("something else")
    assert capsys.readouterr().err == "kvoffload_patch: something else\n"
