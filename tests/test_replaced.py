"""What a test file leaves replaced in the package is found at its end."""

from __future__ import annotations

import pytest
import replaced

from kvoffload_patch.transfer import engine, queue


@pytest.mark.parametrize(
    ("where", "name", "path"),
    [
        (queue.CopyQueue, "_mark", "kvoffload_patch.transfer.queue.CopyQueue._mark"),
        (queue, "forget", "kvoffload_patch.transfer.queue.forget"),
        (engine, "CopyQueue", "kvoffload_patch.transfer.engine.CopyQueue"),
        (engine, "STEP_LOAD_SLICES", "kvoffload_patch.transfer.engine.STEP_LOAD_SLICES"),
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
    monkeypatch.delattr(queue, "forget")
    assert replaced.since(before) == ["kvoffload_patch.transfer.queue.forget"]
