"""`bench serve`: what is said of starts, and of what the GPU itself had."""

from __future__ import annotations

from typing import Any

from scripts.bench.serve import job as job_of
from scripts.bench.serve import report


def record(mode: str, engine: str, start_s: float) -> dict[str, Any]:
    job = {"mode": mode, "engine": engine, "start_s": start_s, "round": 1, "error": ""}
    return {**job, "results": {}}


def test_starts_are_counted_by_what_an_engine_compiles() -> None:
    """Of three rounds the first one's engine without a tier compiles what the others find."""
    sets = job_of.jobs(["start", "startgraphs"], ["off", "ours"], 1)
    assert [job.name for (job,) in sets] == [
        "main-off-1", "main-ours-1", "graphs-off-1", "graphs-ours-1",
    ]  # fmt: skip
    jobs = [record("off", "main", 8.0), record("ours", "main", 9.0)]
    jobs += [record("off", "graphs", s) for s in (79.0, 17.0, 18.0)]
    jobs += [record("ours", "graphs", s) for s in (21.0, 22.0, 23.0)]
    document = {"jobs": jobs, "machine": {}}
    found = report.figures(document)
    medians = {key: {m: v["median"] for m, v in found[key].items()} for key in found}
    assert medians == {"start": {"off": 8.0, "ours": 9.0}, "startgraphs": {"off": 18.0, "ours": 22}}
    said = [line for line in report._verdicts(found, document) if "start" in line]
    assert [line.split()[0] for line in said] == ["ok", "MISS"]


def test_a_prompt_that_the_gpu_still_has_is_a_row_beside_the_same_from_cpu_memory() -> None:
    again = {"samples": [0.02], "cached": [0.9]}
    jobs = [record(mode, "main", 8.0) for mode in ("off", "ours")]
    jobs[1]["results"] = {"s1": {"samples": [0.04, 0.03], "cached": [0.9, 0.9], "again": again}}
    found = report.figures({"jobs": jobs})
    assert found["s1"]["ours"]["samples"] == [0.04, 0.03]
    assert {mode: one["samples"] for mode, one in found["s1again"].items()} == {"ours": [0.02]}
