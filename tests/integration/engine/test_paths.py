"""How many files of the engine's side one lookup, one load and one store pass through."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("vllm")

from integration.engine.mini import Mini
from scheduler_half.scenarios import prompt

import kvoffload_patch

PACKAGE = Path(kvoffload_patch.__file__).parent

# Deciding on one request: what it hits, what it takes of each KV cache group, whether that fits,
# what vLLM is given of it, and whether the request lets its blocks be kept.
LOOKUP_FILES = 12
# That, and from there to its blocks in vLLM's prefix cache, by a plan and its result; with what is
# stored first because the load would overwrite it, with the policy and the two that it chooses
# between, and with what `auto` weighs.
LOAD_FILES = 26
# From vLLM's prefix cache to the plan, and from the result to what can be looked up; with the
# policy and the one that it is now, the order of prefixes around it, what `auto` weighs, and vLLM's
# counters of hits, which the same step's end keeps.
STORE_FILES = 16


@contextmanager
def passed_through(files: set[str]) -> Iterator[None]:
    """Collects the files of the package in which anything is called."""

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in file.parents:
            files.add(file.stem)

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def watched(owner: Any, name: str, files: set[str]) -> None:
    """Collect the files of each call of a method."""
    method: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        with passed_through(files):
            return method(*args, **kwargs)

    setattr(owner, name, call)


@pytest.mark.parametrize("known", ["on the GPU", "nowhere"])
def test_one_lookup_passes_through_few_files(known: str) -> None:
    mini, files = Mini(load_mode="parked"), set[str]()
    if known == "on the GPU":
        mini.add(prompt(6, seed=1), count=1)
        mini.run()
    mini.settle()
    watched(mini.tier._admission, "_look_up", files)
    mini.add(prompt(6, seed=1), count=1)
    mini.step()
    assert {"admission", "lookup"} <= files
    assert len(files) <= LOOKUP_FILES, sorted(files)


@pytest.mark.parametrize("load_mode", ["inline", "parked"])
def test_one_load_passes_through_few_files(load_mode: str) -> None:
    mini, files = Mini(load_mode=load_mode), set[str]()
    mini.only_in_cpu(prompt(6, seed=1))
    watched(mini.tier._admission, "_look_up", files)
    watched(mini.tier._loads, "finish", files)
    watched(mini.manager, "make_plan", files)
    watched(mini.manager, "apply", files)
    name = mini.add(prompt(6, seed=1), count=1)
    mini.run()
    assert mini.hits[name] and {"admission", "loads", "manager"} <= files
    assert len(files) <= LOAD_FILES, sorted(files)


def test_one_store_passes_through_few_files() -> None:
    mini, files = Mini(load_mode="parked"), set[str]()
    watched(mini.tier, "_computed", files)
    watched(mini.manager, "queue_store", files)
    watched(mini.manager, "make_plan", files)
    watched(mini.tier, "on_output", files)
    mini.add(prompt(6, seed=1), count=1)
    mini.run()
    mini.settle()
    assert mini.manager.stats.stored and {"tier", "manager"} <= files
    assert len(files) <= STORE_FILES, sorted(files)
