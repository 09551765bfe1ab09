"""Rows come in the order of their jobs, whichever process ends first."""

from __future__ import annotations

import pytest

from scripts.simulate import parallel
from scripts.simulate.measure import replayed
from scripts.simulate.model import Machine


def test_rows_are_in_the_order_of_their_jobs(capfd: pytest.CaptureFixture[str]) -> None:
    jobs = [(name, "lru", seed, 30.0) for name in ("mix", "chat") for seed in (1, 0)]
    made = parallel.measured(replayed, jobs, 30.0)
    assert [(row["trace"], row["seed"]) for row in made["rows"]] == [(j[0], j[2]) for j in jobs]
    assert made["rows"][1] == replayed(jobs[1])
    assert (made["seconds"], made["model"]) == (30.0, Machine()._asdict())
    assert len(capfd.readouterr().err.splitlines()) == 4
