"""`kvoffload doctor`: its order, its two forms, and its exit status."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvoffload_patch import _bootstrap
from kvoffload_patch.cli.doctor import arming, command, copies, memory
from kvoffload_patch.cli.doctor.findings import Finding
from kvoffload_patch.memory import MemoryRefused, Room

GOOD = {
    "release": "9.9.1", "supported": ">=9", "points": [], "doubts": [], "enabled": False,
    "verdict": "ok",
}  # fmt: skip
ABSENT = "vLLM is not installed here; install it."


@pytest.fixture
def status(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found: dict[str, Any] = dict(GOOD)
    monkeypatch.setattr(_bootstrap, "status", lambda: found)
    monkeypatch.setattr(copies, "check", lambda gpu: [Finding("copies", "bandwidth", "fast")])
    monkeypatch.setattr(arming, "check", lambda: [Finding("arming", "engine core", "armed")])
    monkeypatch.setattr(memory, "shareable", lambda root: Room(8 << 30))
    monkeypatch.setattr(memory, "check_cpu_bytes", lambda nbytes, root: None)
    for name in ("KVOFFLOAD_CPU_GIB", "KVOFFLOAD_OPTIONS"):
        monkeypatch.delenv(name, raising=False)
    return found


def test_all_is_well(status: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    groups = [line for line in lines if line and not line.startswith((" ", "kvoff", "verdict"))]
    assert [g for g in groups if g != "problems"] == [
        "vLLM", "memory", "limits", "NUMA", "copies", "arming",
    ]  # fmt: skip
    assert lines[-1] == "verdict: vLLM would get a CPU tier."


def test_without_vllm_one_sentence_says_so_and_the_rest_is_looked_at(
    status: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    status.update(release=None, verdict=ABSENT)
    assert command.main([]) == 2
    text = capsys.readouterr().out
    assert text.count(ABSENT) == 1 and text.count("refused: ") == 1
    assert "bandwidth" in text and "engine core" not in text
    assert text.endswith("verdict: vLLM would not start with a CPU tier.\n")


def test_the_same_for_programs(status: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    status.update(verdict=ABSENT)
    assert command.main(["--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False and found["problems"][0] == ABSENT
    named = {(f["group"], f["name"]): f for f in found["findings"]}
    assert named["memory", "tier"]["value"] == 4 << 30
    assert named["vLLM", "release"]["refused"] is True


def test_settings_that_are_wrong_are_said_by_the_option(
    status: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status.update(verdict="KVOFFLOAD_CPU_GIB is 'x', expected a number.")
    monkeypatch.setenv("KVOFFLOAD_CPU_GIB", "x")
    monkeypatch.setenv("KVOFFLOAD_OPTIONS", "KVOFFLOAD_CPU_GIB")
    assert command.main([]) == 2
    text = capsys.readouterr().out
    assert "refused: --cpu-gib is 'x', expected a number." in text
    assert "\n  tier " not in text, "nobody knows how large it is to be"


def test_a_size_that_can_never_fit_is_said_once(
    status: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(nbytes: int, root: Any = None) -> None:
        raise MemoryRefused("too large" + " by now" * (root is not None))

    monkeypatch.setenv("KVOFFLOAD_CPU_GIB", "60000")
    monkeypatch.setattr(command, "check_capacity", refuse)
    monkeypatch.setattr(memory, "check_cpu_bytes", refuse)
    status.update(verdict="too large")
    assert command.main([]) == 2
    assert capsys.readouterr().out.count("refused: ") == 1
    status.update(verdict=ABSENT)
    assert command.main([]) == 2
    assert capsys.readouterr().out.count("refused: ") == 2


def test_an_unknown_option_is_refused(status: dict[str, Any]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(["--jsn"])
    assert caught.value.code == 2
