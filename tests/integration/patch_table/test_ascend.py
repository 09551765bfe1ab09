"""The table of vllm-ascend against what its releases have, and armed beside vLLM's.

The snapshots in tests/data/vllm_ascend were read from released sources (`python scripts/release
ascend`); stub modules made from them stand in for these. No Ascend NPU has run any of it.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from integration.patch_table import test_points as of_vllm
from packaging.version import Version

from kvoffload_patch.integration.patch_table.ascend import (
    POINTS,
    RECORDS,
    RELEASES,
    VLLM_ASCEND,
)
from kvoffload_patch.integration.patch_table.verified import RELEASES as OF_VLLM
from kvoffload_patch.patching import decide
from kvoffload_patch.patching.check import fingerprint
from kvoffload_patch.patching.errors import (
    SignatureMismatch,
    UnsupportedVersion,
    UnverifiedHost,
)

FOLDER = of_vllm.ROOT / "tests" / "data" / "vllm_ascend"
SNAPSHOTS: dict[str, dict[str, Any]] = {
    file.stem: json.loads(file.read_text())
    for file in sorted(FOLDER.glob("*.json"), key=lambda file: Version(file.stem))
}
ANY_BODY = dataclasses.replace(VLLM_ASCEND, records=None)
RUNNER = "vllm_ascend.worker.model_runner_v1"
STEP = f"{RUNNER}:NPUModelRunner.execute_model"


def stubs(taken: dict[str, Any], folder: Path) -> Any:
    """Its modules with what the snapshot has, and nothing else; give decide's `find_source`."""
    text = "from __future__ import annotations\n" + of_vllm.module_text(taken, RUNNER)
    file = folder.joinpath(*RUNNER.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)

    def find(module: str) -> Path:
        if module != RUNNER:
            raise FileNotFoundError(module)
        return file

    return find


def test_the_data_are_those_of_this_table() -> None:
    assert RECORDS.table == fingerprint(VLLM_ASCEND, POINTS), "run python scripts/release ascend"
    assert {p.target for p in POINTS} == set(RECORDS.bodies)
    assert list(SNAPSHOTS) == list(RELEASES)


def test_every_release_is_one_of_a_vllm_that_is_supported() -> None:
    assert set(RELEASES) <= set(OF_VLLM)


@pytest.mark.parametrize("release", SNAPSHOTS)
def test_a_release_matches_its_points(release: str, tmp_path: Path) -> None:
    decided = decide(ANY_BODY, POINTS, release, stubs(SNAPSHOTS[release], tmp_path))
    assert [p.attribute for p in decided.wrapped] == [
        "NPUModelRunner.load_model",
        "NPUModelRunner.execute_model",
        "NPUModelRunner.sample_tokens",
    ]


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("scheduler_output", "step", "takes (self, step, intermediate_tensors), expected"),
        ("-> Model", "-> tuple[int] | Model", "returns 'tuple[int] | ModelRunnerOutput"),
        ("intermediate_tensors=...", "intermediate_tensors, more", "the required parameter more"),
    ],
)
def test_a_runner_that_changed_is_refused(old: str, new: str, found: str, tmp_path: Path) -> None:
    taken = copy.deepcopy(SNAPSHOTS["0.23.0"])
    assert old in taken["targets"][STEP]
    taken["targets"][STEP] = taken["targets"][STEP].replace(old, new)
    with pytest.raises(SignatureMismatch) as refusal:
        decide(VLLM_ASCEND, POINTS, "0.23.0", stubs(taken, tmp_path), allow_unverified=True)
    assert found in str(refusal.value)


@pytest.mark.parametrize("version", ["0.11.0", "0.12.0rc1", "0.28.0", "1.0"])
def test_other_releases_are_refused_before_any_source_is_read(version: str) -> None:
    with pytest.raises(UnsupportedVersion) as refusal:
        decide(VLLM_ASCEND, POINTS, version, of_vllm.unread, allow_unverified=True)
    assert str(refusal.value) == (
        f"vllm-ascend {version} is not supported (supported: 0.13.0 to 0.26.0; "
        "KVOFFLOAD_ALLOW_UNVERIFIED=1 reaches >=0.13.0,<0.28 only); "
        "install one of these, or set KVOFFLOAD_STRICT=0 to serve without the CPU tier."
    )


@pytest.mark.parametrize("version", ["0.27.0", "0.23.1", "0.25.1rc2", "0.23.0rc1", "0.23.0.dev1"])
def test_a_release_that_was_not_read_is_refused_and_can_be_allowed(
    version: str, tmp_path: Path
) -> None:
    with pytest.raises(UnverifiedHost, match="this release is not one of those verified"):
        decide(VLLM_ASCEND, POINTS, version, of_vllm.unread)
    sources = stubs(SNAPSHOTS["0.25.1"], tmp_path)
    decided = decide(VLLM_ASCEND, POINTS, version, sources, allow_unverified=True)
    assert len(decided.wrapped) == 3


def test_a_candidate_that_was_read_is_accepted_as_its_release_is(tmp_path: Path) -> None:
    """Most minor releases have nothing else."""
    tags = {release: Version(taken["tag"]) for release, taken in SNAPSHOTS.items()}
    assert RECORDS.candidates == tuple(str(tag) for tag in tags.values() if tag.is_prerelease)
    for release, tag in tags.items():
        with pytest.raises(UnverifiedHost, match="is not what") as refused:  # stubs have no bodies
            decide(VLLM_ASCEND, POINTS, str(tag), stubs(SNAPSHOTS[release], tmp_path / release))
        assert "this release" not in str(refused.value)


# --- Armed in a process that imports both. ---

IMPORT = f"""\
from kvoffload_patch import _bootstrap
_bootstrap.main()
try:
    import vllm
except ImportError as refusal:
    print(refusal)
    raise SystemExit
from kvoffload_patch.integration.install import disarm, installed
from kvoffload_patch.integration.worker.vllm_runner import runner_is_patched
before = installed()
import {RUNNER} as runners
print(sorted(".".join((c.__module__, c.__name__, name)) for c, name in installed() - before))
print(repr(runner_is_patched(runners.NPUModelRunner())))
disarm()
print(sorted(installed()))
"""


def imported(
    tmp_path: Path, ascend: str, vllm: str = "0.23.0", **variables: str
) -> subprocess.CompletedProcess[str]:
    of_vllm.stubs(of_vllm.SNAPSHOTS[vllm], tmp_path)
    of_vllm._install(vllm, tmp_path)
    stubs(SNAPSHOTS["0.23.0"], tmp_path)
    info = tmp_path / f"vllm_ascend-{ascend}.dist-info"
    info.mkdir()
    named = f"Metadata-Version: 2.1\nName: vllm-ascend\nVersion: {ascend}\n"
    (info / "METADATA").write_text(named)
    return of_vllm._run(["-c", IMPORT], tmp_path, KVOFFLOAD_ENABLE="1", **variables)


ALLOWED = {"KVOFFLOAD_ALLOW_UNVERIFIED": "1"}  # the stubs have bodies of no release


def test_its_runner_is_hooked_where_it_is_installed(tmp_path: Path) -> None:
    done = imported(tmp_path, "0.23.0", **ALLOWED)
    methods = ("execute_model", "load_model", "sample_tokens")
    assert done.stdout.splitlines() == [
        "vllm runs",
        str([f"{RUNNER}.NPUModelRunner.{name}" for name in methods]),
        "''",
        "[]",
    ], done.stderr
    assert "patches a vllm-ascend that was not verified: ascend_runner.load_model" in done.stderr


def test_one_that_is_made_for_another_vllm_is_refused(tmp_path: Path) -> None:
    done = imported(tmp_path, "0.22.1", **ALLOWED)
    assert done.stdout == (
        "kvoffload_patch: vllm-ascend 0.22.1 is made for vLLM 0.22.1, found vLLM 0.23.0; install "
        "both of one release, or set KVOFFLOAD_STRICT=0 to serve without the CPU tier.\n"
    )


def test_an_unknown_one_is_refused_and_vllm_stays_untouched(tmp_path: Path) -> None:
    done = imported(tmp_path, "0.40.0", **ALLOWED)
    assert done.stdout.startswith("kvoffload_patch: vllm-ascend 0.40.0 is not supported")
