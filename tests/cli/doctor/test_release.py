"""What is said of the installed vLLM: a verdict that is not ok is the one problem."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffload_patch.cli.doctor import release

POINTS = [{"name": "a", "wrapped": True}, {"name": "b", "wrapped": False}]
GOOD = {
    "release": "9.9.1", "supported": ">=9", "points": POINTS, "doubts": [], "enabled": True,
    "verdict": "ok",
}  # fmt: skip


def test_a_vllm_that_matches() -> None:
    found = {f.name: f for f in release.check(GOOD)}
    assert found["release"].found == "9.9.1"
    assert found["patch points"].found == "2 match, 1 of them are wrapped"
    assert found["switch"].value is True
    assert not any(f.problem or f.refused for f in found.values())


@pytest.mark.parametrize(("table", "said"), [(">=9", "not found"), (None, "not looked for")])
def test_a_refusal_is_one_problem_in_its_own_words(table: str | None, said: str) -> None:
    refused = {"release": None, "points": [], "verdict": "expected vLLM, found none."}
    found = release.check({**GOOD, **refused, "supported": table})
    assert [f.sentence for f in found if f.problem] == ["expected vLLM, found none."]
    assert [f.refused for f in found].count(True) == 1
    assert found[0].found == said and found[1].found == "not compared"


@pytest.mark.parametrize(
    ("build", "given", "source", "found"),
    [
        ("9.9.1+cpu", None, "x = config.gpu_memory_utilization", "a share of all memory"),
        ("9.9.1+cpu", "2", "x = config.gpu_memory_utilization", "2 GiB"),
        ("9.9.1+cpu", None, "", None),
        ("9.9.1+cpu", None, None, None),
        ("9.9.1", None, "x = config.gpu_memory_utilization", None),
    ],
)
def test_the_cpu_build_takes_nearly_all_memory_unless_it_is_told_how_much(
    build: str, given: str | None, source: str | None, found: str | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    if given:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", given)
    if source is not None:
        (tmp_path / "worker.py").write_text(source)
    (one, *more) = release._cpu_cache(build, lambda _: tmp_path / "worker.py") or [None]
    assert (one and one.found, more) == (found, [])
    if found == "a share of all memory":
        assert "does not start where less than that is free; set VLLM_CPU_KVCACHE_S" in one.sentence
        assert not one.refused, "vLLM decides"


def test_what_was_not_verified_is_listed() -> None:
    found = release.check({**GOOD, "doubts": ["a fork", "a body"]})
    assert found[2].found == "a fork; a body"


@pytest.mark.parametrize(("given", "off"), [("1", True), ("0", False), ("", False), ("so", False)])
def test_the_users_own_switch_is_a_reason_for_no_tier(
    given: str, off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVOFFLOAD_DISABLE", given)
    found = release.switched_off()
    assert [f.refused for f in found] == [True] * off
    assert all("KVOFFLOAD_DISABLE is set" in f.sentence for f in found)
