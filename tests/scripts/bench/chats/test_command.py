"""How `bench chats` runs its modes, with processes that play without a server."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.chats import command
from scripts.bench.chats import job as job_of
from scripts.bench.chats.load import SMALL
from scripts.bench.chats.server import Setup
from scripts.bench.jobs import Launch
from scripts.bench.serve import process as process_of

# Plays what it is asked for; with others beside it, only once all of them were asked for the same.
PLAYER = """
import json, os, sys, time
events, name, shared, beside, status = sys.argv[1:]
def event(kind, **values):
    with open(events, "a") as out:
        out.write(json.dumps({"event": kind, **values}) + "\\n")
if status == "start":
    event("failed", scenario="start", error="no")
    sys.exit(0)
event("ready", import_s=0.0, start_s=1.0)
for line in sys.stdin:
    phase = line.strip()
    with open(os.path.join(shared, f"{phase} {name}"), "w") as file:
        file.write(str(os.getpid()))
    while sum(f.startswith(phase + " ") for f in os.listdir(shared)) < int(beside):
        time.sleep(0.01)
    if status == phase:
        sys.exit(4)
    while status == "hangs":
        time.sleep(0.01)
    event("played", scenario=phase, command=phase, result={"by": name})
event("end")
"""


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plays modes, each in a way of its own; returns the records and the last document."""
    (tmp_path / "player.py").write_text(PLAYER)
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr(process_of, "POLL_S", 0.01)

    def played(
        ways: dict[str, str], gpus: list[str], beside: int = 1, timeout: float = 60.0
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        def launch(job: job_of.Job, setup: Setup, spec: Path, events: Path) -> Launch:
            player = [sys.executable, str(tmp_path / "player.py"), str(events), job.mode]
            words = [*player, str(shared), str(beside), ways[job.mode]]
            return Launch(words, {}, True, "a player")

        monkeypatch.setattr(job_of.Job, "launch", launch)
        setup = Setup(tmp_path, SMALL, True, {}, tmp_path / "out", timeout, False, ["first"])
        args = type("Args", (), {"time_limit": 1e9, "json": tmp_path / "written.json"})
        document: dict[str, Any] = {"jobs": []}
        command.play(job_of.jobs(list(ways), 1, "run", gpus), setup, args, document)
        written = json.loads((tmp_path / "written.json").read_text())
        return {job["mode"]: job for job in document["jobs"]}, written

    return played


def test_modes_run_one_after_the_other(play: Any) -> None:
    found, written = play({"floor": "", "ours": ""}, [])
    for mode in ("floor", "ours"):
        assert found[mode]["results"] == {"warm": {"by": mode}, "first": {"by": mode}}
        assert found[mode]["start_s"] == 1.0 and found[mode]["error"] == ""
    assert [job["mode"] for job in written["jobs"]] == ["floor", "ours"]
    assert written["jobs"][1]["results"]["first"] == {"by": "ours"}


def test_side_by_side_all_are_asked_before_one_is_waited_for(play: Any) -> None:
    found, _ = play({"floor": "", "ours": ""}, ["0", "1"], beside=2)
    assert [found[mode]["gpu"] for mode in ("floor", "ours")] == ["0", "1"]
    assert all(list(found[mode]["results"]) == ["warm", "first"] for mode in found)


@pytest.mark.parametrize(
    ("status", "error", "results"),
    [
        ("start", "start: no", []),
        ("first", "ended with status 4", ["warm"]),
    ],
)
def test_one_that_fails_does_not_stop_the_other(
    play: Any, status: str, error: str, results: list[str]
) -> None:
    found, _ = play({"ours": status, "floor": ""}, ["0", "1"])
    assert found["ours"]["error"] == error and list(found["ours"]["results"]) == results
    assert list(found["floor"]["results"]) == ["warm", "first"] and not found["floor"]["error"]


def test_a_mode_is_ended_after_its_time(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    end, follow = process_of._end, process_of.Process.follow

    def follow_soon(process: Any, last: str, timeout: float) -> Any:
        """The one that hangs has little time: what the other needs, no machine has to keep to."""
        return follow(process, last, 0.2 if process.job.mode == "ours" else timeout)

    monkeypatch.setattr(process_of, "_end", lambda process: (process.kill(), end(process)))
    monkeypatch.setattr(process_of.Process, "follow", follow_soon)
    found, _ = play({"ours": "hangs", "floor": ""}, [])
    assert found["ours"]["error"].startswith("not done after")
    assert not found["floor"]["error"]


def test_servers_of_several_ranks_have_several_gpus_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5,6,7")

    def shares(side_by_side: bool, gpus: int, each: int) -> list[str]:
        given = argparse.Namespace(side_by_side=side_by_side, gpus=gpus, gpus_each=each)
        return command.shares_of_gpus(given)

    assert shares(True, 4, 2) == ["2,3", "5,6"]
    assert shares(True, 5, 2) == ["2,3", "5,6"]
    assert shares(True, 2, 1) == ["2", "3"]
    assert shares(False, 4, 2) == []
    for each in (0, 3):
        with pytest.raises(ValueError, match=r"--gpus-each from 1 to --gpus \(2\), found"):
            shares(True, 2, each)


def test_modes_change_their_gpus_from_round_to_round() -> None:
    sets = job_of.jobs(["floor", "ours", "simple"], 2, "run", ["4", "7"])
    assert [[(job.mode, job.gpu, job.slot) for job in each] for each in sets] == [
        [("floor", "4", 0), ("ours", "7", 1)],
        [("simple", "4", 0)],
        [("floor", "7", 1), ("ours", "4", 0)],
        [("simple", "7", 1)],
    ]
    assert len({job.run for each in sets for job in each}) == 2
    alone = job_of.jobs(["floor", "ours"], 1, "run", [])
    assert [[(job.mode, job.gpu) for job in each] for each in alone] == [
        [("floor", "")], [("ours", "")]
    ]  # fmt: skip


def test_a_size_asked_for_is_the_tiers_and_its_share_of_the_others() -> None:
    args = type("Args", (), {"small": False, "cpu_gib": 90.0, "set": ["chats=8", "seed=other"]})
    load = command.load_of(args)
    assert (load.cpu_gib, load.offloading_gib, load.chats, load.seed) == (90.0, 80.0, 8, "other")
    args.set = ["chat=8"]
    with pytest.raises(ValueError, match="expected one of seed, vocabulary"):
        command.load_of(args)
    with pytest.raises(ValueError, match="phase 'last': expected one of quiet, first, later"):
        command.known_phase("last")


def test_of_merged_runs_first_tokens_are_kept_and_all_figures() -> None:
    later = {"gaps": {"p50": 5.0}, "requests": [{"sent": 1.0, "at": [2.5, 4.0, 9.0]}]}
    record = {"results": {"later": later, "quiet": {"first": [3.0]}}}
    command.keep_first_tokens([record])
    assert later == {"gaps": {"p50": 5.0}, "requests": [{"sent": 1.0, "at": [2.5]}]}
    assert record["results"]["quiet"] == {"first": [3.0]}
