"""What is said of the installed vLLM: a verdict that is not ok is the one problem."""

from __future__ import annotations

from kvoffload_patch.cli.doctor import release

POINTS = [{"name": "a", "wrapped": True}, {"name": "b", "wrapped": False}]
GOOD = {"release": "9.9.1", "points": POINTS, "doubts": [], "enabled": True, "verdict": "ok"}


def test_a_vllm_that_matches() -> None:
    found = {f.name: f for f in release.check(GOOD)}
    assert found["release"].found == "9.9.1"
    assert found["patch points"].found == "2 match, 1 of them are wrapped"
    assert found["switch"].value is True
    assert not any(f.problem or f.refused for f in found.values())


def test_a_refusal_is_one_problem_in_its_own_words() -> None:
    bad = {"release": None, "points": [], "enabled": False, "verdict": "expected vLLM, found none."}
    found = release.check(bad)
    assert [f.sentence for f in found if f.problem] == ["expected vLLM, found none."]
    assert [f.refused for f in found].count(True) == 1
    assert found[0].found == "not known" and found[1].found == "not compared"


def test_what_was_not_verified_is_listed() -> None:
    found = release.check({**GOOD, "doubts": ["a fork", "a body"]})
    assert found[2].found == "a fork; a body"
