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

BLOCK_TOKENS = 512


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
        ValueError: a line is not such a request; the text names the line.
    """
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                found.append(_parsed(json.loads(line), block_tokens))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: {type(error).__name__}: {error}"
                ) from None
    if not found:
        raise ValueError(f"{path}: expected a request on each line, found none")
    found.sort(key=lambda request: request.arrival)
    first = found[0].arrival
    return [request._replace(arrival=request.arrival - first) for request in found]


def _parsed(fields: dict[str, Any], block_tokens: int) -> Request:
    prompt, answer = int(fields["input_length"]), int(fields["output_length"])
    if prompt < 1 or answer < 0:
        raise ValueError(f"expected a prompt of 1 token or more, found {prompt} and {answer}")
    ids = tuple(fields["hash_ids"])
    full = prompt // block_tokens
    if len(ids) not in (full, -(-prompt // block_tokens)):
        raise ValueError(f"expected {full} ids or one more for {prompt} tokens, found {len(ids)}")
    keys = ids[:full]
    if "output_hash_ids" in fields:
        keys += tuple(fields["output_hash_ids"])
        if len(keys) != (prompt + answer) // block_tokens:
            raise ValueError(f"expected an id for each full block, found {len(keys)}")
    if len(set(keys)) < len(keys):
        raise ValueError("expected every id once in a request")
    return Request(float(fields["timestamp"]) / 1000, prompt, answer, keys)


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
