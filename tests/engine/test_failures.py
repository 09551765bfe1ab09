"""Copies that fail: no wrong token, and the tier serves on wherever nothing was promised yet."""

from __future__ import annotations

import re
import time

import pytest

PARKED = {"KVOFFLOAD_LOAD_MODE": "parked"}
ASYNC = {"async_scheduling": True}
BOTH = [pytest.param({}, marks=pytest.mark.features), ASYNC]
PLAYED = ["conversations", "twins", "setup"]


@pytest.mark.parametrize("engine", BOTH, ids=["parked", "parked-async"])
def test_parked_loads_that_fail_are_recomputed(plain, real, engine):
    run = real.on(PLAYED, tier=PARKED, engine=engine, TEST_FAIL_LOADS="3")
    off, on = plain["conversations"], run["conversations"]
    assert on["tokens"] == off["tokens"]
    assert on["tier"]["failed"] > 0
    assert on["tier"]["loaded"] > 0, "the tier has stopped loading"
    assert run["twins"]["tokens"] == plain["twins"]["tokens"]
    assert run["setup"]["in_flight"] == (2 if engine else 1)


@pytest.mark.parametrize("engine", BOTH, ids=["parked", "parked-async"])
def test_no_parked_load_ever_works(plain, real, engine):
    run = real.on(["conversations"], tier=PARKED, engine=engine, TEST_FAIL_LOADS="1")
    on = run["conversations"]
    assert on["tokens"] == plain["conversations"]["tokens"]
    assert on["tier"]["loaded"] == 0 and on["tier"]["failed"] > 0


@pytest.mark.parametrize("engine", BOTH, ids=["inline", "inline-async"])
def test_a_load_that_its_step_waits_for_ends_the_engine(real, engine):
    """It would have to take back what others have computed upon it, and perhaps given away."""
    run = real.on(["conversations"], tier={}, engine=engine, TEST_FAIL_LOADS="3")
    assert run.returncode != 0 and not run.results
    said = r"expected copy (\d+) from cpu to gpu to arrive for the step that reads it, found that "
    assert re.search(said + r"it failed \(load \1 is made to fail\)", run.log), run.log[-3000:]
    assert "set KVOFFLOAD_LOAD_MODE=parked" in run.log


def test_stores_that_fail_are_not_read(plain, real):
    run = real.on(["conversations"], tier={}, TEST_FAIL_STORES="2")
    on = run["conversations"]
    assert on["tokens"] == plain["conversations"]["tokens"]
    assert on["tier"]["failed_by"]["gpu raised"] == on["tier"]["failed_copies"] > 0
    assert on["tier"]["loaded"] > 0


FLIPS = {"TEST_FLIP_STORES": "4"}


def test_a_flipped_bit_is_a_miss_if_all_blocks_are_checked(plain, real):
    """A wrong answer otherwise, as the same run without checksums shows."""
    wanted = plain["conversations"]["tokens"]
    unchecked = real.on(["conversations"], tier={"KVOFFLOAD_INTEGRITY": "off"}, **FLIPS)
    assert unchecked["conversations"]["tokens"] != wanted
    assert unchecked["conversations"]["tier"]["mismatches"] == 0
    run = real.on(["conversations"], tier={"KVOFFLOAD_INTEGRITY": "full"}, **FLIPS)
    on = run["conversations"]
    assert on["tokens"] == wanted
    assert on["tier"]["mismatches"] == on["tier"]["failed_by"]["cpu mismatch"] > 0
    assert on["tier"]["mismatches"] == on["tier"]["failed_copies"]
    assert on["tier"]["loaded"] > 0
    assert run.log.count("(expected the checksum that the block in CPU slot ") == 1, run.log[-3000:]
    assert "checksums of all blocks" in run.log and "loads parked" in run.log


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_flipped_bit_on_any_rank_is_a_miss_if_all_blocks_are_checked(plain, real, rank):
    """The engine gets the result of one of them only."""
    ranks, forked = {"tensor_parallel_size": 2, **ASYNC}, {"TEST_FORK_WORKERS": "1"}
    off = real.off(["conversations"], ranks, **forked)
    full = {"KVOFFLOAD_INTEGRITY": "full"}
    run = real.on(["conversations"], ranks, full, **forked, TEST_FLIP_RANK=rank, **FLIPS)
    on = run["conversations"]
    assert on["tokens"] == off["conversations"]["tokens"]
    assert on["tier"]["mismatches"] == on["tier"]["failed_by"]["cpu mismatch"] > 0
    assert on["tier"]["loaded"] > 0
    assert run.log.count("(expected the checksum that the block in CPU slot ") == 1, run.log[-3000:]


@pytest.mark.parametrize("rank", ["alone", "1"])
def test_a_flipped_bit_is_a_miss_where_some_loads_are_compared(plain, real, rank):
    """By default; here all are compared, and so none is within its step."""
    ranks, more, off = None, dict(FLIPS), plain
    if rank != "alone":
        ranks, forked = {"tensor_parallel_size": 2}, {"TEST_FORK_WORKERS": "1"}
        off = real.off(["conversations"], ranks, **forked)
        more |= {"TEST_FLIP_RANK": rank, **forked}
    run = real.on(["conversations"], ranks, {}, TEST_COMPARE_EVERY="1", **more)
    on = run["conversations"]
    assert on["tokens"] == off["conversations"]["tokens"]
    assert on["tier"]["mismatches"] == on["tier"]["failed_by"]["cpu mismatch"] > 0
    assert on["tier"]["loaded"] > 0
    said = "compared with loads until one is right, then with 1 in 256"
    assert f"checksums of all blocks, {said}" in run.log and "loads auto" in run.log


@pytest.mark.parametrize("what", ["load", "step"])
def test_what_fails_on_a_rank_that_does_not_report_ends_the_engine_at_once(real, what):
    ranks, forked = {"tensor_parallel_size": 2}, {"TEST_FORK_WORKERS": "1"}
    variable, at = {"load": ("TEST_FAIL_LOADS", "3"), "step": ("TEST_FAIL_STEP", "20")}[what]
    fails, begun = {"TEST_FAIL_RANK": "1", variable: at}, time.monotonic()
    run = real.on(["conversations"], ranks, {}, **forked, **fails)
    assert run.returncode != 0 and not run.results
    assert "expected rank 1 to carry out its part of each step" in run.log, run.log[-3000:]
    assert f"({what} {at} is made to fail)" in run.log or f": {what} {at} is made to" in run.log
    assert time.monotonic() - begun < 120, "vLLM waits 300 s for a rank"


@pytest.mark.parametrize("tier", [{}, PARKED], ids=["auto", "parked"])
def test_bits_that_change_in_all_blocks_are_found_by_the_first_load(plain, real, tier):
    """No load that is not compared follows it, though by default most are not."""
    run = real.on(["conversations"], tier=tier, TEST_FLIP_STORES="1")
    on = run["conversations"]
    assert on["tokens"] == plain["conversations"]["tokens"]
    assert on["tier"]["mismatches"] > 1 and on["tier"]["loaded"] == 0


@pytest.mark.parametrize(("where", "at"), [("statistics", "3"), ("plan", "60"), ("cached", "8")])
def test_a_tier_that_raises_is_detached_and_the_engine_serves_on(plain, real, where, at):
    run = real.on(
        ["conversations", "twins"],
        tier={"KVOFFLOAD_LOG_INTERVAL": "0.2"},
        TEST_BREAK=where,
        TEST_BREAK_AT=at,
    )
    on = run["conversations"]
    assert on["tokens"] == plain["conversations"]["tokens"]
    assert run["twins"]["tokens"] == plain["twins"]["tokens"]
    assert on["tier"]["stored"] > 0, "it was attached until then"
    assert run.log.count("and is detached; the engine serves without it") == 1, run.log[-3000:]
    assert "is made to fail) and is detached" in run.log
