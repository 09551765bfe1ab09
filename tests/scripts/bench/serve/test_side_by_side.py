"""S4 of `scripts/bench serve` side by side, with processes that play it without an engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.bench import jobs as jobs_of_both
from scripts.bench.serve import command as bench_serve
from scripts.bench.serve import job as job_of
from scripts.bench.serve import load, modes, pairs, report, side_by_side
from scripts.bench.serve import process as process_of
from scripts.bench.serve.sizes import SMALL, Sizes, with_changes

# Says what it is asked in a file that all share, and holds a lock that no two may hold at once.
PLAYER = """
import json, os, sys
spec, name, shared, status = json.load(open(sys.argv[1])), *sys.argv[2:]
def event(kind, **values):
    with open(spec["out"], "a") as out:
        out.write(json.dumps({"event": kind, **values}) + "\\n")
def alone():
    os.mkdir(shared + ".lock")
    os.rmdir(shared + ".lock")
alone()
if status == "never ready":
    sys.exit(3)
event("ready", import_s=1.0, start_s=2.0)
for line in sys.stdin:
    alone()
    scenario, command = line.split()
    with open(shared, "a") as file:
        print(name, command, file=file)
    if status == command:
        sys.exit(4)
    if status == "fails" and command == "arrivals":
        event("failed", scenario=scenario, error="no")
        sys.exit(1)
    while status == "hangs":
        pass
    p99 = {"ours": 3.0, "simple": 2.0}.get(name, 1.0)
    phase = {"p50": 1.0, "p99": p99, "max": 9.0, "cached": 1.0, "ttft_p50": 5.0}
    kinds = ["quiet", "arrivals", *(["gpu"] if spec["floor"] else [])]
    event("played", scenario=scenario, command=command,
          result=kinds if command == "prepare" else phase)
event("end")
"""


@pytest.fixture
def playing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Plays S4 with the given modes; returns the jobs' records and who was asked what."""
    (tmp_path / "player.py").write_text(PLAYER)
    monkeypatch.setattr(side_by_side, "SETTLE_S", 0.0)
    monkeypatch.setattr(process_of, "POLL_S", 0.01)
    started: list[process_of.Process] = []
    begin = process_of.Process.__init__

    def noted(self: process_of.Process, *args: Any) -> None:
        started.append(self)
        begin(self, *args)

    monkeypatch.setattr(process_of.Process, "__init__", noted)

    def play(ways: dict[str, str], repeats: int = 2, late: Any = lambda: False) -> Any:
        def command(mode: str, spec: str) -> list[str]:
            player, shared = str(tmp_path / "player.py"), str(tmp_path / "shared")
            return [sys.executable, player, spec, mode, shared, ways[mode]]

        monkeypatch.setattr(modes, "command", command)
        sizes = with_changes(SMALL, [f"s4_repeats={repeats}"])
        setup = job_of.Setup(tmp_path, sizes, True, {}, tmp_path / "out", 5.0)
        (jobs,) = job_of.jobs(["s4"], list(ways), 1, side_by_side=True)
        side_by_side.run(jobs, setup, lambda: None, late)
        asked = tmp_path / "shared"
        lines = asked.read_text().splitlines() if asked.exists() else []
        return [job.record(setup) for job in jobs], [tuple(line.split()) for line in lines]

    yield play
    assert all(process._process.returncode is not None for process in started)


def test_each_is_prepared_once_and_then_they_take_turns(playing):
    records, asked = playing({"ours": "", "off": "", "simple": ""})
    kinds = {"ours": 3, "off": 3, "simple": 2}
    assert asked[:3] == [("ours", "prepare"), ("off", "prepare"), ("simple", "prepare")]
    turns = [["ours", "off", "simple"], ["simple", "off", "ours"]]
    phases = ["quiet", "arrivals", "gpu"]
    assert asked[3:] == [
        (mode, kind)
        for turn in turns
        for kind in phases
        for mode in turn
        if kind in phases[: kinds[mode]]
    ]
    for record in records:
        assert record["side_by_side"] and record["set"] == records[0]["set"]
        assert record["error"] == "" and record["start_s"] == 2.0
        assert {kind: len(found) for kind, found in record["results"]["s4"].items()} == {
            kind: 2 for kind in phases[: kinds[record["mode"]]]
        }


@pytest.mark.parametrize(
    ("status", "error", "phases"),
    [
        ("never ready", "ended with status 3", None),
        ("prepare", "ended with status 4", None),
        ("arrivals", "ended with status 4", {"quiet": 1, "arrivals": 0}),
        ("fails", "s4: no", {"quiet": 1, "arrivals": 0}),
        ("hangs", "not done after 5 s", None),
    ],
)
def test_one_that_fails_does_not_stop_the_others(playing, monkeypatch, status, error, phases):
    if status == "hangs":
        end = process_of._end
        monkeypatch.setattr(process_of, "_end", lambda process: (process.kill(), end(process)))
    records, _ = playing({"ours": "", "simple": status, "off": ""})
    assert [record["error"] for record in records] == ["", error, ""]
    found = records[1]["results"].get("s4")
    assert phases == (found and {kind: len(each) for kind, each in found.items()})
    assert all(len(records[i]["results"]["s4"]["arrivals"]) == 2 for i in (0, 2))
    assert "ours over off" in report.text({"jobs": records, "machines": []})


def test_no_round_begins_after_the_time_limit(playing):
    begun = iter([False, True])
    records, _ = playing({"ours": "", "off": ""}, 5, lambda: next(begun))
    assert [len(record["results"]["s4"]["quiet"]) for record in records] == [1, 1]


def test_the_same_mode_with_other_variables_plays_beside_it(playing):
    records, _ = playing({"ours": "", "ours+KVOFFLOAD_LOAD_MODE=parked": "", "simple": ""})
    text = report.text({"jobs": records, "machines": []})
    assert "s4, ours over ours+KVOFFLOAD_LOAD_MODE=parked: median 3.000" in text
    assert "s4, ours over simple: median 1.500 (1.500 to 1.500) of 2; quiet median 1.500" in text
    assert "s4, ours+KVOFFLOAD_LOAD_MODE=parked over simple: median 0.500" in text
    assert "MISS  s4_arrivals over simple: 1.5, at most 1" in text


def test_in_the_rounds_nobody_always_follows_the_same():
    rounds = [tuple(side_by_side.order(["a", "b", "c"], turn)) for turn in range(6)]
    assert len(set(rounds)) == 6
    assert side_by_side.order(["a"], 5) == ["a"]


def test_rounds_are_paired_within_a_set_and_as_far_as_both_played():
    def job(mode: str, together: str, *p99: float) -> dict[str, Any]:
        phases = [{"p99": value} for value in p99]
        found = {"quiet": phases, "arrivals": phases}
        return {"mode": mode, "set": together, "results": {"s4": found} if p99 else {}}

    jobs = [job("ours", "1", 2.0, 4.0, 9.0), job("off", "1", 1.0, 1.0), job("ours", "2", 6.0)]
    jobs += [job("off", "2", 1.0), job("simple", "2"), job("off", "", 1.0), {"mode": "ours"}]
    title, line, _ = pairs.lines({"jobs": jobs})
    assert line.startswith("  s4, ours over off: median 4.000 (2.000 to 6.000) of 3; quiet")
    assert pairs.lines({"jobs": jobs[:1]}) == []


def test_only_engines_that_play_s4_alone_run_side_by_side():
    sets = job_of.jobs(["s4", "s4graphs", "tokens"], ["off", "ours"], 1, side_by_side=True)
    assert [[job.engine for job in each] for each in sets] == [
        ["main"] * 2, ["graphs"] * 2, ["tokens"], ["tokens"]
    ]  # fmt: skip
    assert [bool(each[0].together) for each in sets] == [True, True, False, False]
    assert len({each[0].together for each in sets[:2]}) == 2
    with pytest.raises(ValueError, match="expected main to play S4, found s3, s4"):
        job_of.jobs(["s3", "s4"], ["off"], 1, side_by_side=True)
    with pytest.raises(ValueError, match="each mode once"):
        job_of.jobs(["s4"], ["off", "off"], 1, side_by_side=True)
    assert job_of.jobs(["s4"], [], 1, side_by_side=True) == []
    alone = job_of.jobs(["s4"], ["off", "off"], 2)
    assert [len(each) for each in alone] == [1] * 4 and not alone[0][0].together


def test_all_jobs_of_a_set_are_recorded_while_it_runs(tmp_path, monkeypatch):
    written: list[dict[str, Any]] = []

    def write(_: Path | None, document: dict[str, Any]) -> None:
        written.append(json.loads(json.dumps(document)))

    monkeypatch.setattr(jobs_of_both, "write_json", write)
    monkeypatch.setattr(side_by_side, "run", lambda jobs, setup, changed, late: changed())
    sets = job_of.jobs(["s4"], ["off", "ours"], 1, side_by_side=True)
    setup = job_of.Setup(tmp_path, SMALL, True, {}, tmp_path, 5.0)
    args = type("Args", (), {"time_limit": 1e9, "json": None})
    bench_serve.play(sets, setup, args, {"jobs": []})
    assert [job["mode"] for job in written[-1]["jobs"]] == ["off", "ours"]


@pytest.mark.parametrize("sizes", [Sizes(), SMALL])
def test_answers_are_asked_for_tokens_that_the_model_has(tmp_path, sizes):
    job_of.write_tokens_model(tmp_path / "model", small=sizes is SMALL)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    asked: list[int] = []

    def generate(prompts: list[list[int]], max_tokens: int) -> tuple[float, list[Any]]:
        asked.extend(token for prompt in prompts for token in prompt)
        answer = type("Answer", (), {"token_ids": [7] * max_tokens})
        return 0.0, [type("Output", (), {"outputs": [answer], "num_cached_tokens": 0})]

    bench = load.Bench(None, sizes, lambda text: None)
    bench.generate = generate
    load.tokens(bench)
    assert 0 <= min(asked) < max(asked) < config["vocab_size"]
