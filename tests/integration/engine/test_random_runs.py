"""Random runs over vLLM's own scheduler, always the same ones; `scripts/matrix random` has more."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("vllm")

from integration.engine.random_adapters import can_load_again
from integration.engine.random_runs import describe, main, most_in_flight, run
from integration.engine.random_shapes import (
    CHECKPOINTS,
    CHUNKS,
    EVERY,
    PARTS,
    REPLICATED,
    STATE,
    UNCACHED,
)

from kvoffload_patch.config import EVICTIONS, STORES
from kvoffload_patch.integration.engine.eligibility import _PARTS_SHOWN
from kvoffload_patch.integration.engine.eligible_states import STATES_OF_DRAFTS_SHOWN, STATES_SHOWN
from kvoffload_patch.integration.install import older_than, release_in_use

SEEDS = range(160)
STATES = range(20, 38)
SHARDS = range(20, 38)
UNSHARED = range(20, 38)
CHUNKED = range(24, 40)
BESIDE = (*range(20, 38), 900178)  # the last: one behind takes the room of what has arrived
DRAFTS = range(20, 38)
WITHIN = range(20, 38)
SPLIT = 8  # of SEEDS
RARE = {3: ("kept", "tails"), 4: ("ended",)}  # what few runs have, by the part that has most
MOST = most_in_flight(release_in_use())


def played(seeds: Iterable[int], shape: str | None = None, **more: Any) -> Counter[str]:
    """What has happened in the runs of some seeds; ``more``: of `run`."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            seen.update(run(seed, MOST, shape, **more))
        except Exception as error:
            about = describe(seed, MOST, shape, shards=more.get("shards", 1))
            raise AssertionError(f"seed {seed}: {about}") from error
    return seen


@pytest.mark.parametrize("part", range(SPLIT))
def test_random_runs(part: int) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    seen = played(SEEDS[part::SPLIT])
    wanted = (
        "loaded",
        "stored",
        "evicted",
        "failed",
        "resumed",
        "asked",
        "given",
        "changes",
        "stopped",
        "unread",
        "private",
        "crowds",
        "waited",
        "there",
    )
    # Few runs can keep anything through sleep: not those with events, or a copy that failed.
    pauses = ("pauses",) if hasattr(Scheduler, "set_pause_state") else ()
    adapters = ("loaded again",) if can_load_again() else ()
    for name in (*wanted, *pauses, *adapters, "updates", *RARE.get(part, ())):
        assert seen[name], f"no run has {name} anything"


@pytest.mark.parametrize("states", [STATE, CHECKPOINTS, EVERY])
def test_random_runs_of_layers_that_keep_a_state(states: str) -> None:
    skip_unless_taken(states)
    seen = played(STATES, states)
    for name in ("loaded", "stored", "evicted", "failed", "resumed", "states"):
        assert seen[name], f"no run has {name} anything"
    assert (seen["checkpoints"] > 0) == (states == CHECKPOINTS)
    about = [describe(seed, MOST, states) for seed in STATES]
    assert {one["retention"] for one in about} == {None, 0, 64}
    groups = {one["windows"] for one in about}
    assert groups == {(None, states), (states, None, states), (states,)}


def test_random_runs_of_hits_within_a_block() -> None:
    if release_in_use() not in {release for release, _ in _PARTS_SHOWN}:
        pytest.skip(f"the tier takes no such hits with vLLM {release_in_use()}")
    seen = played(WITHIN, PARTS)
    for name in ("loaded", "stored", "evicted", "failed", "resumed", "states", "copied"):
        assert seen[name], f"no run has {name} anything"
    assert {describe(seed, MOST, PARTS)["unit"] for seed in WITHIN} == {1, 4, 8}


@pytest.mark.parametrize("states", [STATE, CHECKPOINTS], ids=["state", "checkpoints"])
def test_random_runs_of_states_beside_drafts(states: str) -> None:
    """Of which some stand; with n-grams and with drafting models, also asynchronous."""
    if (release_in_use(), "cpu") not in STATES_OF_DRAFTS_SHOWN:
        pytest.skip(f"the tier takes no states beside drafts with vLLM {release_in_use()}")
    seen = played(DRAFTS, states, drafts=True)
    for name in ("loaded", "stored", "evicted", "resumed", "settled", "accepted", "refused"):
        assert seen[name], f"no run has {name} anything"
    assert {describe(seed, MOST, states)["asynchronous"] for seed in DRAFTS} == {True, False}


@pytest.mark.parametrize("states", [None, STATE, CHECKPOINTS], ids=["none", "state", "checkpoints"])
def test_random_runs_beside_a_connector(states: str | None) -> None:
    """It brings blocks of every group, within a step and beside it."""
    if states:
        skip_unless_taken(states)
    if states and (release_in_use(), "cpu") not in STATES_SHOWN:
        pytest.skip(f"the tier takes no states beside a connector with vLLM {release_in_use()}")
    seen = played(BESIDE, states, connector=True)
    for name in ("loaded", "stored", "evicted", "failed", "resumed", "connector loads"):
        assert seen[name], f"no run has {name} anything"
    assert (seen["connector failed"] > 0) == (states is None)


def test_random_runs_of_groups_outside_of_the_prefix_cache() -> None:
    """Of windows that vLLM fills again behind a hit, and of rings, nothing is stored or loaded."""
    from vllm.v1.kv_cache_interface import KVCacheSpec

    if not hasattr(KVCacheSpec, "prefix_replay_tokens"):
        pytest.skip(f"vLLM {release_in_use()} has no window that it fills again")
    seen = played(UNSHARED, UNCACHED)
    for name in ("loaded", "stored", "evicted", "failed", "resumed", "replayed"):
        assert seen[name], f"no run has {name} anything"
    assert {len(describe(seed, MOST, UNCACHED)["windows"]) for seed in UNSHARED} == {2, 3}


def test_random_runs_of_attention_within_chunks() -> None:
    seen = played(CHUNKED, CHUNKS)
    for name in ("loaded", "stored", "evicted", "failed", "resumed"):
        assert seen[name], f"no run has {name} anything"
    assert {describe(seed, MOST, CHUNKS)["windows"] for seed in CHUNKED} == {
        (None, 64), (32, None), (48,)
    }  # fmt: skip


def test_random_runs_of_ranks_with_a_part_of_each_block() -> None:
    seen = played(SHARDS, shards=2)
    for name in ("loaded", "stored", "evicted", "failed", "resumed", "given"):
        assert seen[name], f"no run has {name} anything"


@pytest.mark.parametrize("shape", [STATE, PARTS, REPLICATED])
def test_random_runs_of_ranks_with_a_part_of_some_groups(shape: str) -> None:
    """Each has all of the states, and of a group that a drafting model has for itself."""
    if older_than("0.31" if shape == REPLICATED else "0.30"):
        pytest.skip(f"vLLM {release_in_use()} has no such groups that a test can ask for")
    seen = played(SHARDS, shape, shards=2, drafts=shape == REPLICATED)
    for name in ("loaded", "stored", "evicted", "failed", "resumed", "copied", "states"):
        assert seen[name], f"no run has {name} anything"
    assert (seen["accepted"] > 0) == (shape == REPLICATED)


def skip_unless_taken(states: str) -> None:
    """Of the models that are played, Mamba 2 alone has states that a step leaves within it."""
    release = release_in_use()
    if not knows(states):
        pytest.skip(f"vLLM {release} has no {states} that a test can ask for")
    if states == CHECKPOINTS and "MAMBA2" not in STATES_SHOWN.get((release, "cpu"), ()):
        pytest.skip(f"the tier takes no {states} with vLLM {release}")


def knows(states: str) -> bool:
    """Whether the installed vLLM has such states, and a function that says where they are left."""
    from vllm.v1.kv_cache_interface import MambaSpec

    fields = {field.name for field in dataclasses.fields(MambaSpec)}
    if states in (STATE, EVERY):
        # 0.32 has no mode all any more, but its manager of states; 0.33's refuses it.
        gone = states == EVERY and not older_than("0.33")
        return "mamba_cache_mode" in fields and not gone
    rule = importlib.util.find_spec("vllm.model_executor.layers.mamba.checkpoint")
    return "num_prefill_checkpoint_blocks" in fields and rule is not None


def test_the_runs_are_of_all_kinds() -> None:
    abouts = [describe(seed) for seed in SEEDS]
    kinds = {
        (about["in_flight"], about["asynchronous"], about["windows"], about["load_mode"])
        for about in abouts
    }
    assert {kind[0] for kind in kinds} == {1, 2, 3, 6}
    assert {kind[1:3] for kind in kinds} == {
        (asynchronous, windows)
        for asynchronous in (True, False)
        for windows in ((None,), (None, 40))
    }
    assert {kind[3] for kind in kinds} == {"auto", "parked", "inline"}
    assert any(about["in_flight"] > 1 and not about["asynchronous"] for about in abouts)
    assert {about["store"] for about in abouts if about["grows"]} == set(STORES)
    assert {about["policy"] for about in abouts} == {"fcfs", "priority"}
    assert {about["eviction"] for about in abouts} == set(EVICTIONS)
    assert any(about["limits"] for about in abouts) and any(a["lookahead"] for a in abouts)


def test_a_shape_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("0", "0", shape="shards+nosuch") == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: expected --shape of some of state, ") and not said.out
