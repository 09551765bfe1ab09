"""What a test file leaves replaced in the package is found at its end."""

from __future__ import annotations

import pytest
import replaced

from kvoffload_patch.tier import manager, queues


@pytest.mark.parametrize(
    ("where", "name", "path"),
    [
        (queues.StoreQueue, "drop", "kvoffload_patch.tier.queues.StoreQueue.drop"),
        (queues, "_drop", "kvoffload_patch.tier.queues._drop"),
        (manager, "SlotPool", "kvoffload_patch.tier.manager.SlotPool"),
        (manager, "NO_KEY", "kvoffload_patch.tier.manager.NO_KEY"),
    ],
)
def test_what_is_replaced_is_found_until_it_is_back(where: object, name: str, path: str) -> None:
    before = replaced.package()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(where, name, "another")
        assert replaced.since(before) == [path]
    assert not replaced.since(before)


def test_what_is_gone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    before = replaced.package()
    monkeypatch.delattr(queues, "_drop")
    assert replaced.since(before) == ["kvoffload_patch.tier.queues._drop"]
