"""A folder for sockets that nobody else uses."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Variables by which both ends look for sockets in a folder of this test alone."""
    shared = tmp_path / ("shared" + "-long" * 30)  # more than a socket's address may have
    shared.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    monkeypatch.setattr("kvoffload_patch.control.folder.SHARED", shared)
    return {"XDG_RUNTIME_DIR": str(tmp_path)}
