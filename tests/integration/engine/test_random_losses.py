"""What the GPU loses in random runs the tier has, always the same; `random_losses.py` has more."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

pytest.importorskip("vllm")

from integration.engine.random_losses import describe, run
from integration.engine.seeds import played
from vllm.v1 import outputs

from kvoffload_patch.config import STORES

SEEDS = (*range(12), 72, 102)  # 6, 72, 102: blocks taken from whom the step had scheduled


def test_the_tier_has_what_was_computed_before_the_gpu_loses_it() -> None:
    seen = played(run, SEEDS, describe)
    wanted = ("loaded", "resumed", "brought", "lost", "not computed", *STORES)
    assert not [name for name in wanted if not seen[name]], seen
    assert seen["gone"] > 1500, seen


@dataclass
class OfOldReleases:
    """What an output has of a connector up to 0.11.0."""

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None


@pytest.mark.parametrize("of_connector", [None, OfOldReleases])
def test_a_release_that_is_not_told_what_a_connector_did_not_fill_is_played_without_one(
    of_connector: type | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(5)["brought"]
    if of_connector is None:
        monkeypatch.delattr(outputs, "KVConnectorOutput")
    else:
        monkeypatch.setattr(outputs, "KVConnectorOutput", of_connector)
    seen = run(5)
    assert seen["loaded"] and not seen["brought"]
