"""Adding a release, on made-up facts and folders; and what the data file is read back as."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from kvoffload_patch.integration.patch_table.verified import DATA, RECORDS
from kvoffload_patch.patching import Records
from scripts.matrix import engines, results, scheduler
from scripts.release import add, compatibility, digests, patches, readme, snapshot

NEWEST = RECORDS.releases[-1]
NEXT = f"0.{int(NEWEST.split('.')[1]) + 1}.0"


def test_the_data_file_is_what_is_written_of_what_is_read() -> None:
    assert digests.text_of(digests.kept(RECORDS)) == DATA.read_text(encoding="utf-8")


def test_a_release_that_changed_nothing_is_one_line_more() -> None:
    kept = digests.kept(RECORDS)
    old = DATA.read_text(encoding="utf-8").splitlines()
    new = digests.text_of({**kept, NEXT: kept[NEWEST]}).splitlines()
    assert new == [
        *old[: len(kept) + 1],
        f"{old[len(kept) + 1]},",
        f'  "{NEXT}"',
        *old[len(kept) + 2 :],
    ]


def test_a_release_between_two_takes_nothing_from_the_later() -> None:
    kept = digests.kept(RECORDS)
    first, second = RECORDS.releases[:2]
    between = f"{first}.1"
    data = json.loads(digests.text_of({**kept, between: kept[first]}))
    records = Records(**{**data, "releases": tuple(data["releases"])})
    assert records.bodies_of(between) == records.bodies_of(first) == RECORDS.bodies_of(first)
    assert records.bodies_of(second) == RECORDS.bodies_of(second)


def test_the_readme_lists_what_the_files_say() -> None:
    assert readme.PAGE.read_text(encoding="utf-8") == readme.page()


def test_engines_are_those_of_each_minor_releases_last_cpu_build() -> None:
    assert {"0.9.2", "0.10.2", "0.11.2", "0.32.0"} <= set(engines.RELEASES)
    assert not {"0.9.1", "0.11.0", "0.11.1", "0.33.0"} & set(engines.RELEASES)
    assert [r for r in RECORDS.releases if r in engines.RELEASES] == engines.RELEASES


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders for what is written, and a next release that is the newest one."""
    facts = digests.kept(RECORDS)[NEWEST]
    data = tmp_path / "vllm.json"
    data.write_text(DATA.read_text(encoding="utf-8"), encoding="utf-8")
    for module in (add, digests, readme):
        monkeypatch.setattr(module, "DATA", data)
    (tmp_path / "README.md").write_text(readme.PAGE.read_text(encoding="utf-8"))
    for folder in ("snapshots", "matrix", "patches"):
        (tmp_path / folder).mkdir()
    for module, name, value in (
        (add, "ROOT", tmp_path),
        (add, "fetch_builds", lambda release: []),
        (digests, "facts_of", lambda release, folders: facts),
        (snapshot, "FOLDER", tmp_path / "snapshots"),
        (snapshot, "take", lambda release: {"release": release}),
        (patches, "make", lambda releases, read: [("a.patch", "text")]),
        (results, "FOLDER", tmp_path / "matrix"),
        (compatibility, "PAGE", tmp_path / "compatibility.md"),
        (readme, "PAGE", tmp_path / "README.md"),
        (scheduler, "play", play),
    ):
        monkeypatch.setattr(module, name, value)
    return tmp_path


def play(release: str, **scenario: str) -> dict[str, Any]:
    one = {"outcome": "passed", **scenario}
    return {"kind": "scheduler", "release": release, "scenarios": {"hit": one}}


def test_everything_that_is_kept_of_a_release_is_written(tree: Path) -> None:
    add.add(NEXT)
    assert Records.load(tree / "vllm.json").releases == (*RECORDS.releases, NEXT)
    assert json.loads((tree / f"snapshots/{NEXT}.json").read_text()) == {"release": NEXT}
    assert (tree / "patches/a.patch").read_text() == "text"
    assert json.loads((tree / f"matrix/scheduler-{NEXT}.json").read_text())["release"] == NEXT
    assert (tree / "compatibility.md").exists()
    assert f"| every release from 0.9.1 to {NEXT} |" in (tree / "README.md").read_text()


def test_changed_bodies_are_listed_and_wait_for_a_reader(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = digests.kept(RECORDS)[NEWEST]
    name = min(facts.bodies)
    other = dataclasses.replace(facts, bodies={**facts.bodies, name: {"0123456789abcdef"}})
    monkeypatch.setattr(digests, "facts_of", lambda release, folders: other)
    before = {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}
    with pytest.raises(add.NotAdded, match=r"^1 functions differ .*(?s:.*)--reviewed") as refusal:
        add.add(NEXT)
    assert f"\n  {name}\n" in str(refusal.value)
    assert {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()} == before
    add.add(NEXT, reviewed=True)
    assert Records.load(tree / "vllm.json").bodies_of(NEXT)[name] == {"0123456789abcdef"}


def test_a_scheduler_that_fails_is_no_result(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = {"outcome": "failed", "why": "assert 1 == 2"}
    monkeypatch.setattr(scheduler, "play", lambda release: play(release, **failing))
    with pytest.raises(add.NotAdded, match="1 scenarios of its scheduler failed"):
        add.add(NEXT)
    assert not list((tree / "matrix").iterdir()) and not (tree / "compatibility.md").exists()


def test_after_a_change_of_the_table_every_release_is_compared_again(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    facts = digests.kept(RECORDS)[NEWEST]
    monkeypatch.setattr(digests, "facts_of", lambda release, _: seen.append(release) or facts)
    monkeypatch.setattr(digests, "fetch_builds", lambda release: [])
    digests.current()
    assert seen == []
    monkeypatch.setattr(digests, "fingerprint", lambda *_: "another")
    digests.current()
    assert seen == list(RECORDS.releases)
