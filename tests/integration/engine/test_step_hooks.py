"""Hooks of each block: what vLLM is called with, and what is noted. `test_tier` has the others."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload_patch.integration.engine import step_hooks

CALL = {
    "num_cached_blocks": 1, "num_full_blocks": 3, "block_size": 16, "kv_cache_group_id": 2,
}  # fmt: skip
FIRST = ("request", "abcd")


class Pool:
    """Notes how it is called, as a release with or without a mask takes it."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        self.calls.append((args, kwargs))
        return "what vLLM returns"


def tier(decode: bool = True) -> Any:
    answers: list[Any] = []
    choice = SimpleNamespace(decode=decode, note_answers=lambda *args: answers.append(args))
    return SimpleNamespace(
        tier=SimpleNamespace(cached=[], events=None, choice=choice, answers=answers)
    )


@pytest.mark.parametrize(
    ("args", "kwargs", "passed"),
    [
        ((), {}, ((), {})),
        ((), {"block_mask": None}, ((), {})),  # as releases without it are called
        ((), {"block_mask": [True]}, (([True],), {})),
        (([True],), {}, (([True],), {})),
        (([True], 7), {"later": 8}, (([True], 7), {"later": 8})),
        ((None, 7), {}, ((None, 7), {})),
        ((), {"later": 8}, ((), {"later": 8})),
        ((), {"block_mask": [True], "later": 8}, (([True],), {"later": 8})),
    ],
)
@pytest.mark.parametrize("live", [True, False])
def test_vllm_is_given_all_that_it_was_called_with(
    args: tuple[Any, ...], kwargs: dict[str, Any], passed: Any, live: bool
) -> None:
    pool, breaker = Pool(), tier()
    hook = step_hooks.cache_full_blocks(pool, [True] if live else [], breaker)
    if args:
        assert hook(*FIRST, *CALL.values(), *args, **kwargs) == "what vLLM returns"
    else:
        assert hook(*FIRST, **CALL, **kwargs) == "what vLLM returns"
    assert pool.calls == [((*FIRST, 1, 3, 16, 2, *passed[0]), passed[1])]
    assert breaker.tier.cached == ([("request", "bc")] if live else [])


def test_blocks_of_answers_are_told_where_they_are_not_stored() -> None:
    breaker = tier(decode=False)
    step_hooks.cache_full_blocks(Pool(), [True], breaker)(*FIRST, **CALL, block_mask=None)
    with_hashes = step_hooks.cache_full_blocks_with_hashes(Pool(), [True], breaker)
    with_hashes(*FIRST, ["hash"], *CALL.values(), "sha256")
    assert breaker.tier.cached == [("request", "bc")] * 2
    assert breaker.tier.answers == [(*FIRST, 1, 3, 16)] * 2


@pytest.mark.parametrize("part", ["events", "answers"])
@pytest.mark.parametrize("hook", ["cache_full_blocks", "cache_full_blocks_with_hashes"])
def test_vllm_does_not_hear_of_what_fails_besides(part: str, hook: str) -> None:
    breaker, failed = tier(decode=False), list[str]()

    def fails(*_: Any) -> None:
        raise LookupError(part)

    if part == "events":
        breaker.tier.events = SimpleNamespace(cached=fails)
    else:
        breaker.tier.choice.note_answers = fails
    breaker.failed = lambda where, error: failed.append(f"{where}: {error}")
    hashes = ["hash"] if hook == "cache_full_blocks_with_hashes" else []
    made = getattr(step_hooks, hook)(Pool(), [True], breaker)
    if hashes:
        assert made(*FIRST, hashes, *CALL.values()) == "what vLLM returns"
    else:
        assert made(*FIRST, **CALL) == "what vLLM returns"
    assert failed == [f"cache_full_blocks: {part}"]
    assert breaker.tier.cached == [("request", "bc")]


def test_what_vllm_passes_as_a_rule_makes_no_call_but_its_own() -> None:
    """It is called for each request that fills a block."""
    called: list[str] = []

    def note(frame: Any, event: str, arg: Any) -> None:
        if event in ("call", "c_call"):
            called.append(getattr(arg, "__name__", frame.f_code.co_name))

    hook = step_hooks.cache_full_blocks(lambda *args: None, [True], tier())
    sys.setprofile(note)
    try:
        hook("request", ["a", "b", "c"], **CALL, block_mask=None)
    finally:
        sys.setprofile(None)
    assert called[:3] == ["hook", "<lambda>", "append"] and called[3:] == ["setprofile"]
