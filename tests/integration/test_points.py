"""The table of patch points against releases, and against the sources of the installed vLLM."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvoffload_patch.integration.points import POINTS, SUPPORTED_VLLM, VLLM
from kvoffload_patch.patching import decide, find_source, installed_version
from kvoffload_patch.patching.check import check_table
from kvoffload_patch.patching.errors import SignatureMismatch, UnsupportedVersion

RELEASES = [f"0.{minor}.{patch}" for minor in range(26, 32) for patch in (0, 1)] + ["0.32.0"]


@pytest.mark.parametrize("release", [*RELEASES, "0.32.0rc1", "0.31.0+cpu"])
def test_every_name_is_selected_once_for_each_release(release: str) -> None:
    check_table(POINTS, [release])


def test_names_and_hooks_are_complete() -> None:
    assert len({p.name for p in POINTS}) == len(POINTS)
    assert all(p.why and p.remove_when for p in POINTS)


@pytest.mark.parametrize("release", ["0.25.1", "0.33.0", "0.34.0"])
def test_other_releases_are_refused_before_any_source_is_read(release: str) -> None:
    def unread(module: str) -> Path:
        raise AssertionError(f"{module} was looked for")

    with pytest.raises(UnsupportedVersion) as refusal:
        decide(VLLM, POINTS, release, unread)
    text = str(refusal.value)
    assert release in text and SUPPORTED_VLLM in text and VLLM.remedy in text


def test_the_installed_release_matches() -> None:
    pytest.importorskip("vllm")
    decision = decide(VLLM, POINTS, installed_version(VLLM))
    assert [p.name for p in decision.points] == [p.name for p in POINTS]


def test_changed_signatures_are_named_in_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("vllm")

    def copied(module: str) -> Path:
        return tmp_path / f"{module}.py"

    for module in {p.module for p in POINTS}:
        shutil.copy(find_source(module), copied(module))
    _replace(copied("vllm.v1.core.block_pool"), "self, num_blocks: int)", "self, count: int)")
    _replace(
        copied("vllm.v1.core.sched.scheduler"),
        "def reset_prefix_cache(\n        self, reset_running_requests: bool = False, "
        "reset_connector: bool = False\n    ) -> bool:",
        "def reset_prefix_cache(self, reset_running_requests, reset_connector) -> int:",
    )
    with pytest.raises(SignatureMismatch) as refusal:
        decide(VLLM, POINTS, installed_version(VLLM), copied)
    text = str(refusal.value)
    assert text.startswith(f"2 of {len(POINTS)} patch points do not match")
    assert "pool.get_new_blocks takes (self, count), expected (self, num_blocks)" in text
    assert "scheduler.reset_prefix_cache returns 'int', expected 'bool'" in text
    assert "\n" not in text and text.endswith(f"{VLLM.remedy}.")


def _replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, old
    file.write_text(text.replace(old, new))
