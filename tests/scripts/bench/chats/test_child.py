"""What `bench chats` keeps of a server's samples."""

from __future__ import annotations

from scripts.bench.chats.child import changes


def test_only_what_has_changed_is_kept_counters_by_how_much() -> None:
    before = {"used": 5.0, "copies_total": 3.0, 'loads_total{mode="inline"}': 2.0, "slowdown": 1.0}
    after = {"used": 4.0, "copies_total": 3.0, 'loads_total{mode="inline"}': 6.0, "slowdown": 1.0}
    after |= {"seconds_sum": 0.5, "new": 2.0}
    kept = {"used": 4.0, 'loads_total{mode="inline"}': 4.0, "seconds_sum": 0.5, "new": 2.0}
    assert changes(before, after) == kept
