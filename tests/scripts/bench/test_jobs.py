"""How sets of jobs follow one another, without processes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from scripts.bench import jobs
from scripts.bench.chats.job import Job
from scripts.bench.chats.load import SMALL
from scripts.bench.chats.server import Setup


def test_a_set_is_recorded_beside_earlier_runs_and_none_begins_too_late(
    tmp_path: Path, capsys: Any
) -> None:
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps({"machines": ["one"], "jobs": [{"mode": "old"}], "sizes": 3}))
    document: dict[str, Any] = {"machines": [], "jobs": []}
    assert jobs.merge(document, [earlier])[0]["sizes"] == 3
    args = argparse.Namespace(time_limit=1e9, json=tmp_path / "written.json")
    seen: list[bool] = []

    def run(begun: list[Job], changed: Any, late: Any) -> None:
        args.time_limit = -1.0  # of the sets behind this one
        begun[0].results["first"] = 1
        changed()
        seen.append(late())

    planned = [[Job("ours", 1, "run")], [Job("floor", 1, "run"), Job("simple", 1, "run")]]
    setup = Setup(tmp_path, SMALL, True, {}, tmp_path, 1.0, False, [])
    jobs.play(planned, run, setup, args, document)
    written = json.loads(args.json.read_text())
    assert [job["mode"] for job in written["jobs"]] == ["old", "ours"] and written == document
    assert written["machines"] == ["one"] and written["jobs"][1]["results"] == {"first": 1}
    assert seen == [True]
    assert "Time limit: 2 jobs not started, first chats-floor-1." in capsys.readouterr().out
