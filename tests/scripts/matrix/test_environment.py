"""Which Python an environment for a release is made with."""

from __future__ import annotations

import sys

import pytest

from scripts.matrix import environment


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
