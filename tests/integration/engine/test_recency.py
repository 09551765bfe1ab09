"""What is told of requests that have ended, so that their blocks leave the tier together."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from integration.engine.mini import Mini
from scheduler_half.scenarios import prompt


@pytest.mark.parametrize("load_mode", ["inline", "parked"])
def test_what_was_stored_or_loaded_at_once_is_not_put_together_again(
    load_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mini = Mini(load_mode=load_mode)
    told: list[Any] = []
    monkeypatch.setattr(mini.manager, "request_ended", told.append)
    asked = prompt(6, seed=1)
    mini.only_in_cpu(asked)
    name = mini.add(asked, count=1)
    mini.run()
    mini.step()
    assert mini.hits[name] and told == []
    mini.add(asked + prompt(2, seed=2), count=1)
    mini.run()
    mini.step()
    (keys,) = told
    assert len(keys) == 8 and all(map(mini.manager.holds, keys))
