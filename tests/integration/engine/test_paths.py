"""Which files of the engine's side one lookup, one load and one store pass through."""

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
REQUESTS = "engine/requests"

# What each file decides there; a file that decides nothing of its own does not belong in a path.
# Deciding on one request, until vLLM is given what it hits.
LOOKUP = {
    "engine/adapters/vllm_groups.py": "which blocks a hit takes of each KV cache group",
    "engine/adapters/vllm_lookup.py": "the longest hit, by vLLM's own lookup over a stand-in pool",
    "engine/adapters/vllm_pool.py": "which keys the GPU has",
    "engine/adapters/vllm_scheduler.py": "whether it may hit, and what must be free to admit it",
    "engine/blocks/recency.py": "which of the blocks that it hits stay recent in the tier",
    "engine/blocks/store_choice.py": "whether it lets its blocks be kept",
    "engine/reports/stats.py": "whether its hit counts, or did when it was looked up before",
    "engine/requests/admission.py": "whether it fits: it is admitted, or waits",
    "engine/requests/inline.py": "whether its hit is loaded within the step",
    "engine/requests/loads.py": "whether what it hits on the GPU would be handed out to a load",
    "engine/requests/lookup.py": "what it hits in both caches, or did when it was looked up before",
    "tier/state.py": "which keys can be read from the tier",
}
# That, and from there to its blocks in vLLM's prefix cache, by a plan and its result.
LOAD = {
    **LOOKUP,
    "engine/blocks/free_front.py": "which free blocks are no longer the next to be lost",
    "engine/requests/pace.py": "whether computing the hit takes less than loading it",
    "engine/step_hooks.py": "whether blocks that vLLM hands out are told to the tier",
    "engine/tier.py": "which stores go first, because the load overwrites their blocks",
    "tier/entries.py": "what the step waits for, and which slots are read until when",
    "tier/gain.py": "whether loads say that `auto` should be lazy",
    "tier/manager.py": "what the plan has, and what its result ends",
    "tier/policies/adaptive.py": "which of two policies is in use",
    "tier/policies/arc.py": "what its hits and misses change in the order of eviction",
    "tier/policies/batches.py": "the place of the slots in that order",
    "tier/policies/lost.py": "which keys were evicted lately",
    "tier/prefixes.py": "that slots of a load, and the heads before them, are not evicted",
    "tier/queues.py": "which stores that wait lose their blocks to the load",
    "tier/recency_model.py": "what a small tier with the other policy would have had",
}
# From vLLM's prefix cache to the plan, and from the result to what can be looked up.
STORE = {
    "engine/blocks/recency.py": "behind which blocks of its prefix a block comes",
    "engine/blocks/store_choice.py": "which of the blocks that a step has cached are stored",
    "engine/requests/lookup.py": "which requests may hit more, now that it is stored",
    "engine/requests/pace.py": "what a step takes, by which later loads are judged",
    "engine/tier.py": "when it is queued, and what the result of a step ends",
    "tier/entries.py": "which transfers are done, and which slots are written until when",
    "tier/gain.py": "whether what is computed says that `auto` should be lazy",
    "tier/manager.py": "which stores the plan takes, and what its result makes readable",
    "tier/policies/adaptive.py": "which of two policies is in use",
    "tier/policies/arc.py": "the new slot's place in the order of eviction",
    "tier/policies/batches.py": "how that order is kept",
    "tier/prefixes.py": "that the tail of its prefix is evicted before its head",
    "tier/queues.py": "which stores wait",
    "tier/recency_model.py": "what a small tier with the other policy would have had",
    "tier/slots.py": "which slot it takes",
    "tier/state.py": "whether there is room, or what is evicted for it",
}


@contextmanager
def passed_through(files: set[str]) -> Iterator[None]:
    """Collects the files of the package in which anything is called."""

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in file.parents:
            files.add(file.relative_to(PACKAGE).as_posix().removeprefix("integration/"))

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


def test_files_of_one_name_in_two_folders_are_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    files, names = set[str](), {f"{folder}/tier.py" for folder in ("engine", "slots")}
    with passed_through(files):
        for name in names:
            exec(compile("def of(): pass\nof()", tmp_path / name, "exec"), {})
    assert files == names


@pytest.mark.parametrize("known", ["on the GPU", "nowhere"])
def test_one_lookup_passes_through_no_other_files(known: str) -> None:
    mini, files = Mini(load_mode="parked"), set[str]()
    if known == "on the GPU":
        mini.add(prompt(6, seed=1), count=1)
        mini.run()
    mini.settle()
    watched(mini.tier._admission, "_look_up", files)
    mini.add(prompt(6, seed=1), count=1)
    mini.step()
    assert {f"{REQUESTS}/admission.py", f"{REQUESTS}/lookup.py"} <= files
    assert files - LOOKUP.keys() == set()


@pytest.mark.parametrize("load_mode", ["inline", "parked"])
def test_one_load_passes_through_no_other_files(load_mode: str) -> None:
    mini, files = Mini(load_mode=load_mode), set[str]()
    mini.only_in_cpu(prompt(6, seed=1))
    watched(mini.tier._admission, "_look_up", files)
    watched(mini.tier._loads, "finish", files)
    watched(mini.manager, "make_plan", files)
    watched(mini.manager, "apply", files)
    name = mini.add(prompt(6, seed=1), count=1)
    mini.run()
    assert mini.hits[name] and {f"{REQUESTS}/loads.py", "tier/manager.py"} <= files
    assert files - LOAD.keys() == set()


def test_one_store_passes_through_no_other_files() -> None:
    mini, files = Mini(load_mode="parked"), set[str]()
    watched(mini.tier, "_computed", files)
    watched(mini.manager, "queue_store", files)
    watched(mini.manager, "make_plan", files)
    watched(mini.tier, "on_output", files)
    mini.add(prompt(6, seed=1), count=1)
    mini.run()
    mini.settle()
    assert mini.manager.stats.stored and {"engine/tier.py", "tier/manager.py"} <= files
    assert files - STORE.keys() == set()
