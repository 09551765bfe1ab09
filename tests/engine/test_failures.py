"""Copies that fail: answers are those of plain vLLM, nothing hangs, and the tier goes on."""

from __future__ import annotations

import pytest

PARKED = {"KVOFFLOAD_LOAD_MODE": "parked"}
ASYNC = {"async_scheduling": True}
PLAYED = ["conversations", "twins", "setup"]
MODES = {
    "inline": ({}, {}),
    "parked": (PARKED, {}),
    "inline-async": ({}, ASYNC),
    "parked-async": (PARKED, ASYNC),
}


@pytest.fixture(scope="module", params=MODES, ids=list(MODES))
def mode(request):
    return MODES[request.param]


def test_loads_that_fail_are_computed_anew(plain, real, mode):
    tier, engine = mode
    run = real.on(PLAYED, tier=tier, engine=engine, TEST_FAIL_LOADS="3")
    off, on = plain["conversations"], run["conversations"]
    assert on["tokens"] == off["tokens"]
    assert on["tier"]["failed"] > 0
    assert on["tier"]["loaded"] > 0, "the tier has stopped loading"
    assert run["twins"]["tokens"] == plain["twins"]["tokens"]
    assert run["setup"]["in_flight"] == (2 if engine else 1)


def test_no_load_ever_works(plain, real, mode):
    tier, engine = mode
    run = real.on(["conversations"], tier=tier, engine=engine, TEST_FAIL_LOADS="1")
    on = run["conversations"]
    assert on["tokens"] == plain["conversations"]["tokens"]
    assert on["tier"]["loaded"] == 0 and on["tier"]["failed"] > 0


def test_stores_that_fail_are_not_read(plain, real):
    run = real.on(["conversations"], tier={}, TEST_FAIL_STORES="2")
    on = run["conversations"]
    assert on["tokens"] == plain["conversations"]["tokens"]
    assert on["tier"]["failed"] > 0 and on["tier"]["loaded"] > 0
