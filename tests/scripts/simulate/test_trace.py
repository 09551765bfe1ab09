"""Traces in the form of the public Mooncake traces, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.simulate import trace
from scripts.simulate.trace import Request


def line(**fields: object) -> str:
    whole = {"timestamp": 2000, "input_length": 1100, "output_length": 30, "hash_ids": [5, 6, 7]}
    return json.dumps({**whole, **fields})


def written(folder: Path, *lines: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_line_is_a_request_whose_full_blocks_have_keys(tmp_path: Path) -> None:
    path = written(tmp_path, line(), line(timestamp=500, output_hash_ids=[8]))
    with pytest.raises(ValueError, match="line 2.*an id for each full block, found 3"):
        trace.read(path)
    later = line(timestamp=3500, output_length=500, output_hash_ids=[8])
    path = written(tmp_path, later, line(), "")
    first, second = Request(0.0, 1100, 30, (5, 6)), Request(1.5, 1100, 500, (5, 6, 8))
    assert trace.read(path) == [first, second], "by time, the first at 0"
    assert second.prompt_keys(512) == (5, 6)
    assert (second.reusable(512), second.blocks(512)) == (2, 4)


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    assert Request(0.0, 1024, 1, (1, 2)).reusable(512) == 1


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hash_ids": [1]}, "expected 2 ids or one more for 1100 tokens, found 1"),
        ({"hash_ids": [1, 1, 2]}, "every id once"),
        ({"input_length": 0}, "expected input_length to be 1 or more tokens, found 0"),
        ({"output_length": 1.5}, "expected output_length to be 0 or more tokens, found 1.5"),
        ({"timestamp": "x"}, "expected timestamp in milliseconds, .*, found 'x'"),
        ({"timestamp": float("nan")}, "expected timestamp in milliseconds, .*, found nan"),
        ({"timestamp": float("inf")}, "expected timestamp in milliseconds, .*, found inf"),
        ({"timestamp": 10**400}, "expected timestamp in milliseconds"),
        ({"hash_ids": "abc"}, "expected hash_ids to be a list of whole numbers, found 'abc'"),
        ({"hash_ids": [1, "b", 3]}, "expected hash_ids to be a list of whole numbers"),
        ({"output_hash_ids": None}, "expected output_hash_ids to be a list of whole numbers"),
    ],
)
def test_what_is_no_request_is_refused_with_its_line(
    fields: dict[str, object], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"line 2: .*{says}"):
        trace.read(written(tmp_path, line(), line(**fields)))


@pytest.mark.parametrize("text", ["[]", "no JSON"])
def test_a_line_that_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trace.jsonl, line 1: expected an object of JSON, found"):
        trace.read(written(tmp_path, text))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, line())
    path.write_bytes(b"\xff" + path.read_bytes())
    with pytest.raises(ValueError, match=r"trace.jsonl: expected text in UTF-8, found .*0xff"):
        trace.read(path)
    with pytest.raises(ValueError, match="none: expected a trace, found No such file"):
        trace.read(tmp_path / "none")


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="found none"):
        trace.read(written(tmp_path, ""))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    requests = [Request(0.0, 1100, 500, (5, 6, 8)), Request(0.25, 600, 0, (9,))]
    trace.write(tmp_path / "t", requests)
    assert trace.read(tmp_path / "t") == requests
