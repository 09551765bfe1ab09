"""An engine that is ended and started again in one process: a tier of its own, and nothing left."""

from __future__ import annotations

from engine import release


def test_each_engine_has_a_tier_of_its_own_and_leaves_nothing(real):
    # Plain vLLM's second engine would only show that its answers do not change.
    (off,) = real.off(["restarts"], TEST_RESTARTS="0")["restarts"]["seen"]
    run = real.on(["restarts"], TEST_COLLECTS="1")
    on, held = run["restarts"]["seen"], run["restarts"]["held"]
    assert [one["tokens"] for one in on] == [off["tokens"]] * 3
    found = 4 * (419 // release.block_size() * release.block_size())
    assert [one["cached"] for one in on] == [[0, found]] * 3, "of the one before, or not its own"
    assert not sum(off["cached"])
    assert run.log.count("KV offload: CPU tier of ") == 3
    assert held[0]["tier's threads"] == held[0]["undumped"] == 0
    assert held[2] == held[1], "each one more leaves something"
