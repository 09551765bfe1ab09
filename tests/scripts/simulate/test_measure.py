"""Results of other sides are kept, if they are of the same replays, and looked at before any."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import Refused
from scripts.simulate import measure
from scripts.simulate.model import Machine

ROWS = [{"side": "lru"}, {"side": "arc"}]


def results(path: Path, **other: Any) -> Path:
    document = {"model": Machine()._asdict(), "seconds": 60.0, "rows": ROWS, **other}
    path.write_text(json.dumps(document))
    return path


def test_rows_of_other_sides_are_kept(tmp_path: Path) -> None:
    assert measure.kept(results(tmp_path / "out"), 60.0, ["arc"]) == [{"side": "arc"}]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "found No such file or directory"),
        ("no JSON", "found Expecting value"),
        ("[]", "found list indices"),
        ({"seconds": 5.0}, "found seconds 5.0 in place of 60.0"),
        ({"model": {}}, "found model {} in place of"),
    ],
)
def test_nothing_is_replayed_where_what_is_to_be_kept_is_not_there(
    content: Any,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    if isinstance(content, dict):
        results(out, **content)
    elif content is not None:
        out.write_text(content)
    monkeypatch.setattr(sys, "argv", ["x", "--sides", "lru", "--seconds", "60", "--out", str(out)])
    monkeypatch.setattr(measure, "measure", lambda *_: pytest.fail("it replays"))
    with pytest.raises(Refused) as refused:
        measure.main()
    said = str(refused.value)
    assert f"{out}: expected results of this command" in said and says in said
