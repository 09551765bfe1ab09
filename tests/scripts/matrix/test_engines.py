"""What `matrix engines` makes of a release's tests; it runs for minutes itself."""

from __future__ import annotations

import pytest

from scripts.matrix import engines

GOOD = {
    "release": "0.19.1",
    "seconds": 90,
    "pytest_status": 0,
    "tests": [
        {"name": "a", "outcome": "passed"},
        {"name": "b", "outcome": "skipped", "why": "vLLM 0.19.1 has no b"},
    ],
    "tokens_compared": 10,
    "tokens_equal": 10,
    "tokens_loaded": 128,
}


def test_a_run_in_which_all_is_well_is_green():
    assert engines.verdict(GOOD) == "green"
    assert "skipped: b: vLLM 0.19.1 has no b" in engines.summary(GOOD | {"verdict": "green"})


@pytest.mark.parametrize(
    "change",
    [
        {"pytest_status": 1},
        {"tests": []},
        {"tests": [{"name": "b", "outcome": "skipped", "why": "all"}]},
        {"tests": [*GOOD["tests"], {"name": "c", "outcome": "failed", "why": "E   no"}]},
        {"tokens_equal": 9},
        {"tokens_compared": 0, "tokens_equal": 0},
        {"tokens_loaded": 0},
    ],
    ids=lambda change: ",".join(change),
)
def test_anything_less_is_red(change):
    assert engines.verdict({**GOOD, **change}) == "red"


def test_a_release_without_an_environment_is_red():
    assert engines.verdict({"release": "0.9.2", "why": "`uv` failed"}) == "red"
