"""Which tags of vllm-ascend count, and what is read of them: from a repository made here."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from kvoffload_patch.integration.patch_table import ascend as table
from scripts.release import ascend
from scripts.release.digests import Differs

RUNNER = """\
class NPUModelRunner(GPUModelRunner):
    def load_model(self) -> None:
        pass

    @torch.inference_mode()
    def execute_model(
        self, scheduler_output, intermediate_tensors=None
    ) -> ModelRunnerOutput | IntermediateTensors | None:
        pass

    def sample_tokens(
        self, grammar_output
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | IntermediateTensors:
        pass
"""


def test_the_last_patch_of_a_minor_release_counts_final_before_candidate() -> None:
    names = ["v0.11.0", "v0.12.0rc1", "v0.23.0rc1", "v0.23.0", "v0.24.0rc1", "v0.24.0rc2"]
    names += ["v0.13.0", "v0.13.1rc1", "v0.9.1-dev-old", "nightly"]
    assert ascend.tags_of(names) == {
        "0.13.1": "v0.13.1rc1",
        "0.23.0": "v0.23.0",
        "0.24.0": "v0.24.0rc2",
    }


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ascend, "FOLDER", tmp_path / "snapshots")
    monkeypatch.setattr(table, "DATA", tmp_path / "digests.json")
    return tmp_path / "clone"


def tagged(clone: Path, text: str) -> None:
    file = clone / "vllm_ascend" / "worker" / "model_runner_v1.py"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "a"], ["tag", "v0.23.0"]):
        subprocess.run(["git", "-C", str(clone), *command], check=True)


def test_headers_and_digests_are_written(clone: Path, tmp_path: Path) -> None:
    tagged(clone, RUNNER)
    ascend.write(clone)
    taken = json.loads((tmp_path / "snapshots" / "0.23.0.json").read_text())
    assert taken["tag"] == "v0.23.0" and set(taken["targets"]) == {p.target for p in table.POINTS}
    data = json.loads((tmp_path / "digests.json").read_text())
    assert data["releases"] == ["0.23.0"] and set(data["bodies"]) == set(taken["targets"])


def test_a_release_that_differs_is_an_error(clone: Path, tmp_path: Path) -> None:
    tagged(clone, RUNNER.replace("load_model(self)", "load_model(self, again)"))
    with pytest.raises(Differs, match=r"ascend_runner.load_model .*parameter again"):
        ascend.write(clone)
    assert not (tmp_path / "digests.json").exists()
