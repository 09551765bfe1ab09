"""What `matrix gpu` makes of what its program prints, with a program that plays nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine import gpu_answers, gpu_kinds

from scripts import Refused
from scripts.matrix import gpu, results

PROGRAM = """\
import json, sys
print("a line of an engine")
outcomes = {outcomes!r}
tests = [{{"name": str(sys.argv[1:]), "outcome": outcome}} for outcome in outcomes]
print(json.dumps({{"release": "0.26.0", "tests": tests}}))
"""


@pytest.fixture
def argv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line; results go to ``out`` in the test's folder."""
    line = ["matrix gpu", "--out", str(tmp_path / "out"), "--runners", "v1", "--commit", "abc"]
    line += ["--kinds", "mla"]
    monkeypatch.setattr(sys, "argv", line)
    monkeypatch.setattr(gpu, "PROGRAM", tmp_path / "program.py")
    return line


@pytest.mark.parametrize(
    ("outcomes", "status", "verdict"),
    [(["passed", "passed"], 0, "green"), (["passed", "failed"], 1, "red")],
)
def test_the_result_has_a_verdict(
    argv: list[str], tmp_path: Path, outcomes: list[str], status: int, verdict: str
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format(outcomes=outcomes))
    assert gpu.main() == status
    result = json.loads((tmp_path / "out/gpu-0.26.0.json").read_text())
    assert (result["kind"], result["verdict"], result["commit"]) == ("gpu-engine", verdict, "abc")
    assert result["tests"][0] == {"name": "['v1', '4', 'mla']", "outcome": "passed"}


def test_a_kind_is_chosen_by_its_whole_name_or_by_parts_of_several() -> None:
    parts = gpu_kinds.parts_of("graphs, two stages|states on two")
    names = {kind.name for _, kind in gpu_kinds.chosen(["v1", "v2"], parts, 4)}
    assert names == {
        "graphs, two stages",
        "graphs, two stages of two ranks",
        "graphs, two stages of two ranks that hold the same",
        "states on two ranks: gated delta net",
        "states on two ranks: Mamba 2",
        "states on two ranks with a part of each block: gated delta net",
        "states on two stages: gated delta net",
    }
    assert len(gpu_kinds.chosen(["v1"], gpu_kinds.parts_of(""), 1)) > 10


def test_a_program_that_fails_leaves_no_result(argv: list[str], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("raise SystemExit(3)")
    with pytest.raises(SystemExit, match=r"expected a result of program\.py, found status 3"):
        gpu.main()
    assert not (tmp_path / "out").exists()


def test_what_was_compared_before_the_program_failed_is_kept(
    argv: list[str], tmp_path: Path
) -> None:
    stops = PROGRAM.format(outcomes=["passed"]) + "raise SystemExit(3)"
    (tmp_path / "program.py").write_text(stops)
    with pytest.raises(SystemExit, match="found status 3"):
        gpu.main()
    result = json.loads((tmp_path / "out/gpu-0.26.0.json").read_text())
    assert (result["verdict"], len(result["tests"])) == ("green", 1)


def test_engines_are_spread_over_gpus_and_each_kind_is_told_when_it_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str, str]] = []

    def play(_: Path, gpus: str, runner: str, kind: gpu_kinds.Kind, *side: bool) -> dict:
        seen.append((f"{runner} {kind.name}", gpus))
        return {}

    def compare(runner: str, kind: gpu_kinds.Kind, *sides: dict) -> dict:
        return {"runner": runner, "name": kind.name}

    monkeypatch.setattr(gpu_kinds, "play", play)
    monkeypatch.setattr(gpu_kinds, "compare", compare)
    monkeypatch.setattr(gpu_kinds, "MODELS", dict.fromkeys(gpu_kinds.MODELS, lambda folder: None))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    told = list(gpu_kinds.main(["v1"], 1, ["graphs"]))
    names = [run["name"] for run in told[-1]["tests"]]
    assert len(names) > 5 and [len(one["tests"]) for one in told] == [*range(1, len(names) + 1)]
    alone = {gpu for name, gpu in seen if "two" not in name}
    assert alone == {"4", "6"} and {gpu for name, gpu in seen if "two" in name} == {"4,6"}


def test_an_engine_that_does_not_end_has_failed_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hangs(*_: object, **__: object) -> None:
        program = "import time; print('begun', flush=True); time.sleep(60)"
        command = [sys.executable, "-c", program]
        subprocess.run(command, text=True, stdout=subprocess.PIPE, timeout=2)

    monkeypatch.setattr(gpu_kinds.engines, "run", hangs)
    played = gpu_kinds.play(Path("/models"), "0", "v1", gpu_kinds.KINDS[0], True, True)
    assert played == {"error": "no end within 2 s: begun\n"}


@pytest.mark.parametrize(
    ("alone", "brought", "with_tier", "outcome", "why"),
    [
        ([1, 2], 64, [1, 2], "passed", ""),
        ([1, 3], 64, [1, 3], "skipped", "gives 1 of 2 answers"),
        ([1, 2], 0, [1, 2], "skipped", "brings nothing back"),
        ([1, 2], 64, [1, 3], "failed", ""),
    ],
)
def test_beside_lmcache_the_tier_is_judged_where_lmcache_alone_is_right(
    alone: list[int], brought: int, with_tier: list[int], outcome: str, why: str
) -> None:
    kind = next(kind for kind in gpu_kinds.KINDS if kind.lmcache)
    assert gpu_kinds._sides(kind) == [(False, False), (True, True), (False, True)]
    about = {"setup": {"runner": "r", "scheduler": "s", "groups": 1}, "one_copy": ""}

    def answered(tokens: list[int]) -> dict:
        apart = {"tokens": [[n] for n in range(4)]}
        asked = {"tokens": [[n] for n in tokens], "both": 1, "tier": {"loaded": 5}}
        return {**about, "sensitivity": apart, kind.asked: {**asked, "brought": brought}}

    found = gpu_answers.compare("v2", kind, *map(answered, ([1, 2], with_tier, alone)))
    assert found["outcome"] == outcome
    assert why in found.get("why", "") and ("why" in found) == bool(why)


@pytest.mark.parametrize(
    ("tokens", "error", "mismatches", "outcome"),
    [
        ([1, 2, 1, 2], "", 3, "passed"),
        ([1, 2, 1, 3], "", 3, "failed"),
        ([1, 2, 1, 2], "", 0, "failed"),
        ([1, 2, 1], "RuntimeError: an end", 3, "failed"),
    ],
)
def test_no_answer_may_leave_that_read_a_flipped_bit(
    tokens: list[int], error: str, mismatches: int, outcome: str
) -> None:
    kind = next(k for k in gpu_kinds.KINDS if k.asked == gpu_answers.FLIPPED)
    about = {"setup": {"runner": "r", "scheduler": "s", "groups": 1}, "one_copy": ""}
    about["sensitivity"] = {"tokens": [[n] for n in range(4)]}

    def answered(tokens: list[int], ended: str, mismatches: int) -> dict:
        tier = {"loaded": 5, "mismatches": mismatches}
        asked = {"tokens": [[n] for n in tokens], "ended": ended, "tier": tier}
        return {**about, kind.asked: asked}

    plain = answered([1, 2, 1, 2], "", 0)
    found = gpu_answers.compare("v2", kind, plain, answered(tokens, error, mismatches))
    assert found["outcome"] == outcome


def test_what_was_written_elsewhere_is_recorded_beside_earlier_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)

    def result(commit: str, date: str, **outcomes: str) -> dict:
        tests = [{"name": name, "outcome": outcome} for name, outcome in outcomes.items()]
        head = {"kind": "gpu-engine", "release": "0.26.0", "runners": [commit]}
        head["device"] = f"the GPU of {commit}"
        return {**head, "tests": tests, "date": date, "commit": commit, "verdict": "green"}

    def record(one: dict) -> tuple[int, dict]:
        (tmp_path / "elsewhere.json").write_text(json.dumps(one))
        monkeypatch.setattr(sys, "argv", ["gpu", "--record", str(tmp_path / "elsewhere.json")])
        return gpu.main(), json.loads((tmp_path / "gpu-0.26.0.json").read_text())

    assert record(result("old", "2026-11-01", one="passed", two="failed"))[0] == 1
    status, kept = record(result("new", "2026-11-02", one="passed", three="skipped"))
    assert (status, kept["verdict"]) == (1, "red"), "an earlier kind that failed is not forgotten"
    assert (kept["commit"], kept["runners"]) == ("new", ["new", "old"])
    assert [one["name"] for one in kept["tests"]] == ["one", "three", "two"]
    assert kept["tests"][2] == {
        "name": "two", "outcome": "failed", "date": "2026-11-01", "commit": "old",
        "device": "the GPU of old",
    }  # fmt: skip
    status, kept = record(result("newest", "2026-11-03", two="passed"))
    assert (status, kept["verdict"]) == (0, "green")
    assert [one.get("commit") for one in kept["tests"]] == [None, "new", "new"]


def test_a_result_of_skipped_kinds_alone_is_not_green() -> None:
    assert gpu._verdict([{"outcome": "skipped"}]) == gpu._verdict([]) == "red"


@pytest.mark.parametrize(
    ("log", "why"),
    [
        (
            "ValueError: To serve at least one request with 2048, no. Try increasing `a`\nmore",
            "To serve at least one request with 2048, no.",
        ),
        (
            "1 error\n  Value error, Model Runner V1 does not support: b [type=value_error",
            "Model Runner V1 does not support: b",
        ),
        (
            "1 error\n  Value error, B requires Model Runner V2. Remove C. [type=value_error",
            "B requires Model Runner V2.",
        ),
    ],
    ids=["no room", "not with this runner", "with the other alone"],
)
def test_an_engine_that_vllm_does_not_start_was_not_run(log: str, why: str) -> None:
    kind, answered = gpu_kinds.KINDS[0], {"one_copy": ""}
    found = gpu_answers.compare("v1", kind, answered, {"error": log})
    assert (found["outcome"], found["why"]) == ("skipped", f"vLLM does not start: {why}")
    other = gpu_answers.compare("v1", kind, {"error": "RuntimeError: no"}, answered)
    assert (other["outcome"], other["why"]) == (
        "skipped", "plain vLLM ends by itself: RuntimeError: no"
    )  # fmt: skip
    other = gpu_answers.compare("v1", kind, answered, {"error": "RuntimeError: no"})
    assert (other["outcome"], other["why"]) == ("failed", "on: RuntimeError: no")


def slept() -> tuple[dict, dict]:
    """What is played for the kind with sleep, plain and with the tier, as it is to be."""
    kind = next(kind for kind in gpu_kinds.KINDS if kind.name == "sleep")
    moments = (*gpu_answers.KEPT, *gpu_answers.LOST)
    weights = {"other weights": 1, "other weights, level 1": 1, "level 2": 2, "reset": 2}
    plain = {name: [[weights.get(name, 0), 7]] for name in moments}
    # Behind a hit the answer may be another one, by its arithmetic: it is that of plain vLLM's hit.
    hit = {f"{name}, twice": [[*answer[0][:1], 8]] for name, answer in plain.items()}
    kept = {name: hit[f"{name}, twice"] for name in gpu_answers.KEPT}
    cached = {name: 416 * (name in gpu_answers.KEPT) for name in moments}
    about = {"runner": "r", "tier": {"loaded": 5}}
    off = {"tokens": {**plain, **hit}, "cached": {}, **about}
    on = {"tokens": {**plain, **hit, **kept}, "cached": cached, **about}
    return (
        {kind.asked: off, "one_copy": ""},
        {kind.asked: on, "one_copy": ""},
    )


def test_what_is_kept_through_sleep_is_compared_with_what_plain_vllm_finds() -> None:
    kind = next(kind for kind in gpu_kinds.KINDS if kind.name == "sleep")
    found = gpu_answers.compare("v1", kind, *slept())
    assert found["outcome"] == "passed" and found["answers"] == found["answers_equal"] == 16
    assert found["kept"] == list(gpu_answers.KEPT)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda on: on["tokens"].update({"level 1": [[0, 9]]}),
        lambda on: on["tokens"].update({"level 2, twice": [[2, 9]]}),
        lambda on: on["cached"].update({"level 2": 416}),
        lambda on: on["cached"].update({"level 1": 0}),
    ],
    ids=["another answer", "another one after it", "kept what is wrong", "lost what is right"],
)
def test_sleep_has_failed_if_anything_of_it_is_wrong(wrong) -> None:
    kind = next(kind for kind in gpu_kinds.KINDS if kind.name == "sleep")
    off, on = slept()
    wrong(on[kind.asked])
    assert gpu_answers.compare("v2", kind, off, on)["outcome"] == "failed"


def commanded() -> tuple[dict, dict]:
    """What is played for the kind that is told things, plain and with the tier, as it is to be."""
    moments = ["first", "stored", "paused", "resumed", "smaller", "larger", "larger, stored"]
    moments += ["emptied", "emptied, stored"]
    hits = {**dict.fromkeys(moments, [416, 416]), "first": [0, 0], "first, twice": [416, 416]}
    had = {name: 416 * (name not in gpu_answers.NOT_HAD) for name in hits}
    cached = {**{name: [tokens] * 2 for name, tokens in had.items()}, "smaller": [0, 32]}
    about = {"runner": "r", "tier": {"loaded": 5}}

    def side(cached: dict) -> dict:
        # Behind a hit the answer may be another one, by its arithmetic.
        tokens = {name: [[n, n and 1] for n in of_each] for name, of_each in cached.items()}
        return {"tokens": tokens, "cached": cached, **about}

    said = {"states": ["paused", *["on"] * 4], "capacities": [64, 64, 9, 64, 64]}
    return (
        {"commanded": side(hits), "one_copy": ""},
        {"commanded": {**side(cached), **said}, "one_copy": ""},
    )


def test_what_was_found_in_part_is_not_compared_after_commands() -> None:
    kind = next(kind for kind in gpu_kinds.KINDS if kind.asked == gpu_answers.COMMANDED)
    found = gpu_answers.compare("v1", kind, *commanded())
    assert found["outcome"] == "passed" and found["answers"] == found["answers_equal"] == 19
    assert found["had"] == list(gpu_answers.HAD)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda on: on["tokens"]["resumed"].__setitem__(0, [0, 9]),
        lambda on: on["tokens"]["paused"].__setitem__(1, [0, 9]),
        lambda on: on["cached"].update({"paused": [0, 416]}),
        lambda on: on["cached"].update({"emptied, stored": [416, 0]}),
        lambda on: on.update(capacities=[64, 64, 64, 64, 64]),
        lambda on: on.update(states=["on"] * 5),
    ],
    ids=["another answer", "another one of nothing", "found", "lost", "no smaller", "not paused"],
)
def test_commands_have_failed_if_anything_of_them_is_wrong(wrong) -> None:
    kind = next(kind for kind in gpu_kinds.KINDS if kind.asked == gpu_answers.COMMANDED)
    off, on = commanded()
    wrong(on[kind.asked])
    assert gpu_answers.compare("v2", kind, off, on)["outcome"] == "failed"


def test_answers_that_differ_are_told_as_they_are() -> None:
    kind = next(kind for kind in gpu_kinds.KINDS if kind.asked == gpu_answers.COMMANDED)
    off, on = commanded()
    assert "differ" not in gpu_answers.compare("v2", kind, off, on)
    on["commanded"]["tokens"]["first"][1] = [7, 7]
    assert gpu_answers.compare("v2", kind, off, on)["differ"] == [(1, [0, 0], [7, 7])]


def test_kinds_beside_kvcached_are_left_out_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEST_KVCACHED", raising=False)
    assert gpu_kinds.chosen(["v1", "v2"], ["kvcached"], 1) == []
    monkeypatch.setenv("TEST_KVCACHED", "/a/folder")
    names = [(runner, kind.name) for runner, kind in gpu_kinds.chosen(["v1", "v2"], ["cached"], 1)]
    assert names == [
        ("v1", "beside kvcached, adaptive"),
        ("v1", "beside kvcached, LRU"),
        ("v1", "beside kvcached, ARC"),
        ("v1", "beside kvcached, ARC, synchronous"),
    ]


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, "passed"),
        ({"tokens": [[1], [2], [4]]}, "failed"),
        ({"tokens": [[9], [2], [3]]}, "passed"),  # its first prompt was a hit on one side only
        ({"pool": "BlockPool"}, "failed"),
        ({"cached": [0, 16, 0]}, "failed"),
        ({"pages": 18}, "failed"),
        ({"tier": {"loaded": 5, "stored": 6, "evicted": 0}}, "failed"),
    ],
)
def test_what_must_hold_beside_kvcached(changes: dict, outcome: str) -> None:
    kind = next(kind for kind in gpu_kinds.KINDS if kind.name == "beside kvcached, LRU")
    side = {
        "setup": {"runner": "v1", "scheduler": "Scheduler", "groups": 1},
        "sensitivity": {"tokens": [[1], [2], [3], [4]]},
        "singles": {"tokens": [[1], [2]]},
        "batches": {"tokens": [[1], [2], [3], [4]], "cached": [0, 16, 16, 0]},
        "one_copy": "",
    }
    off = {**side, "shrunk": {"tokens": [[1], [2], [3]], "cached": [16, 0, 32]}}
    on = {"tokens": [[1], [2], [3]], "cached": [0, 0, 32], "pool": "ElasticBlockPool"}
    on |= {"pages_before": 9, "pages": 4, "total": 4, "of": 18}
    on |= {"tier": {"loaded": 5, "stored": 6, "evicted": 7}, **changes}
    found = gpu_answers.compare("v1", kind, off, {**side, "shrunk": on})
    assert found["outcome"] == outcome
    side["batches"] = {"tokens": [[1], [2], [3], [5]], "cached": [0, 16, 16, 0]}
    assert gpu_answers.compare("v1", kind, off, {**side, "shrunk": on})["outcome"] == "failed"


@pytest.mark.parametrize("by_layer", [True, False])
def test_loads_that_do_not_come_by_layer_are_no_result_of_that_kind(by_layer: bool) -> None:
    kind = next(kind for kind in gpu_kinds.KINDS if kind.name == "loads by layer, eager prefill")
    side = {
        "setup": {"runner": "v1", "scheduler": "Scheduler", "groups": 1},
        "sensitivity": {"tokens": [[1], [2], [3], [4]]},
        "singles": {"tokens": [[1], [2]]},
        "batches": {"tokens": [[1], [2]], "loaded": 320, "cached": [0, 16]},
        "one_copy": "",
    }
    found = gpu_answers.compare("v1", kind, side, {**side, "by_layer": by_layer})
    assert found["outcome"] == ("passed" if by_layer else "failed")


def test_kvcached_is_installed_into_a_folder_without_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    status = 0

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(returncode=status)

    monkeypatch.setattr(gpu.subprocess, "run", run)
    gpu.built(Path("packages"), tmp_path)
    (command,) = asked
    assert {"--no-index", "--no-build-isolation", "--no-deps", "kvcached"} <= set(command)
    assert command[command.index("--target") + 1] == str(tmp_path)
    status = 1
    with pytest.raises(Refused, match="expected packages of kvcached in packages, found what pip"):
        gpu.built(Path("packages"), tmp_path)


def test_what_the_program_refuses_is_refused(argv: list[str], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("raise SystemExit(2)")
    with pytest.raises(Refused, match=r"expected what program\.py can play, found what it says"):
        gpu.main()


def test_the_pytorch_that_a_release_pins_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["torchaudio==1", "torch==2.13.0; platform_system != 'None'", "x>1; extra == 'y'"]
    monkeypatch.setattr(gpu_kinds.metadata, "requires", lambda name: asked)
    assert gpu_kinds.pinned("torch") == "2.13.0" and gpu_kinds.pinned("numpy") == ""
