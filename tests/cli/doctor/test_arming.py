"""Whether a process that imports vLLM's engine is armed, and what is said if not."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from kvoffload_patch.cli.doctor import arming

WRAPPED = [f"{arming.ENGINE}.EngineCore.__init__", "vllm.other.f"]


def test_armed() -> None:
    core, startup = arming.judge({"installed": WRAPPED, "started": True})
    assert core.found == "armed, 1 functions wrapped" and startup.found == "runs by itself"
    assert not core.refused and not core.problem
    _, startup = arming.judge({"installed": WRAPPED, "started": False})
    assert "start with kvoffload COMMAND" in startup.found


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ({"error": "ImportError: libcuda"}, "ImportError: libcuda"),
        ({"installed": WRAPPED[1:], "started": True}, "nothing of vllm.v1.engine.core was wrapped"),
    ],
)
def test_not_armed_is_a_refusal_that_says_why(found: dict[str, Any], why: str) -> None:
    (core,) = arming.judge(found)
    assert core.refused and why in core.problem and core.remedy


def test_a_locale_in_which_pytorch_cannot_be_imported_is_named_as_the_cause() -> None:
    (core,) = arming.judge({"error": "UnicodeDecodeError: 'ascii' codec can't decode byte 0xe2"})
    assert core.remedy.startswith("set PYTHONUTF8=1, ")


def test_the_child_is_switched_on_whatever_is_set_here(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(arming, "ask", lambda *a, **k: asked.append(k) or {"error": "x"})
    arming.check()
    switches = {"KVOFFLOAD_ENABLE": "1", "KVOFFLOAD_DISABLE": "", "KVOFFLOAD_STRICT": "1"}
    assert asked == [switches]


@pytest.mark.engine
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_installed_vllm_is_armed_in_a_child() -> None:
    core, startup = arming.check()
    assert core.found.startswith("armed, "), core.sentence
    assert startup.name == "start-up file"
