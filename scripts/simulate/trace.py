"""Traces of requests: JSON lines in the form of the public Mooncake traces.

A line has ``timestamp`` (milliseconds), ``input_length`` and ``output_length`` (tokens), and
``hash_ids``: a number for each block of the prompt, the last one begun included, which is the same
in two requests where everything up to the end of that block is. ``output_hash_ids``, which those
traces lack, names the blocks that the answer fills; without it nothing of an answer is found again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from scripts import Refused

BLOCK_TOKENS = 512
MOST_MS = 1e15  # 30,000 years: a step of a replay still counts beside it


class Request(NamedTuple):
    """One request of a trace.

    Attributes:
        arrival: seconds since the first request.
        prompt_tokens, answer_tokens: how many.
        keys: of the full blocks of prompt and answer, head first. Blocks that nobody can name
            again (the answers of a trace that has no ids for them) have none.
    """

    arrival: float
    prompt_tokens: int
    answer_tokens: int
    keys: tuple[int, ...]

    def prompt_keys(self, block_tokens: int) -> tuple[int, ...]:
        """Of the blocks that the prompt fills."""
        return self.keys[: self.prompt_tokens // block_tokens]

    def reusable(self, block_tokens: int) -> int:
        """How many blocks a cache can save: the last token of a prompt is always computed."""
        return (self.prompt_tokens - 1) // block_tokens

    def blocks(self, block_tokens: int) -> int:
        """Blocks that prompt and answer need in the end."""
        return -(-(self.prompt_tokens + self.answer_tokens) // block_tokens)


def read(path: Path, block_tokens: int = BLOCK_TOKENS) -> list[Request]:
    """A trace in the order of its timestamps.

    Raises:
        Refused: it cannot be read, or a line is not such a request; the text names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise Refused(f"{path}: expected a trace, found {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Refused(f"{path}: expected text in UTF-8, found {error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(_parsed(line, block_tokens))
            except ValueError as error:
                raise Refused(f"{path}, line {number}: {error}") from None
    if not found:
        raise Refused(f"{path}: expected a request on each line, found none")
    found.sort(key=lambda request: request.arrival)
    first = found[0].arrival
    return [request._replace(arrival=request.arrival - first) for request in found]


def _parsed(line: str, block_tokens: int) -> Request:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise Refused(f"expected an object of JSON, found {error}") from None
    if not isinstance(fields, dict):
        raise Refused(f"expected an object of JSON, found {line.strip()[:40]!r}")
    prompt, answer = _tokens(fields, "input_length", 1), _tokens(fields, "output_length", 0)
    ids = _ids(fields, "hash_ids")
    full = prompt // block_tokens
    if len(ids) not in (full, -(-prompt // block_tokens)):
        raise Refused(f"expected {full} ids or one more for {prompt} tokens, found {len(ids)}")
    keys = ids[:full]
    if "output_hash_ids" in fields:
        keys += _ids(fields, "output_hash_ids")
        if len(keys) != (prompt + answer) // block_tokens:
            raise Refused(f"expected an id for each full block, found {len(keys)}")
    if len(set(keys)) < len(keys):
        raise Refused("expected every id once in a request, found one twice")
    return Request(_milliseconds(fields, "timestamp") / 1000, prompt, answer, keys)


def _milliseconds(fields: dict[str, Any], name: str) -> float:
    """So few that a step's time still counts beside them."""
    found = fields.get(name)
    if type(found) not in (int, float) or not abs(found) <= MOST_MS:
        raise Refused(f"expected {name} in milliseconds, {MOST_MS:.0e} at most, found {found!r}")
    return float(found)


def _tokens(fields: dict[str, Any], name: str, least: int) -> int:
    found = fields.get(name)
    if type(found) is not int or found < least:
        raise Refused(f"expected {name} to be {least} or more tokens, found {found!r}")
    return found


def _ids(fields: dict[str, Any], name: str) -> tuple[int, ...]:
    found = fields.get(name)
    if not isinstance(found, list) or not all(type(one) is int for one in found):
        raise Refused(f"expected {name} to be a list of whole numbers, found {found!r:.60}")
    return tuple(found)


def write(path: Path, requests: Iterable[Request], block_tokens: int = BLOCK_TOKENS) -> None:
    """Write a trace that `read` reads."""
    with path.open("w", encoding="utf-8") as file:
        for request in requests:
            full = request.prompt_tokens // block_tokens
            fields = {
                "timestamp": round(request.arrival * 1000, 3),
                "input_length": request.prompt_tokens,
                "output_length": request.answer_tokens,
                "hash_ids": request.keys[:full],
                "output_hash_ids": request.keys[full:],
            }
            file.write(json.dumps(fields) + "\n")
