"""What `bench chats` keeps of a server's samples."""

from __future__ import annotations

from scripts.bench.chats.child import changes


def test_only_what_has_changed_is_kept() -> None:
    before = {"used": 5.0, "copies": 3.0, "stopped": 1.0}
    after = {"used": 4.0, "copies": 3.0, "stopped": 1.0, "new": 2.0}
    assert changes(before, after) == {"used": -1.0, "new": 2.0}
