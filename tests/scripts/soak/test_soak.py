"""What a soak makes of what it sees: judging answers, faults, growth, and the page."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvoffload_patch.transfer import engine as copy_engine
from kvoffload_patch.transfer.backends.slots import SlotMemory
from scripts.soak import faulty, page, run, watch
from scripts.soak.traffic import (
    ANSWER_TOKENS,
    FAILED,
    LEFT,
    RIGHT,
    TIED,
    WRONG,
    Traffic,
    Turn,
    answer_key,
)

CLEAN: dict[str, Any] = {
    "machine": {
        "date": "2026-01-02T03", "gpu": "none", "cpu": "a CPU", "vllm": "1", "package": "c",
    },
    "minutes": 5.0, "integrity": "full", "cpu_gib": 0.1, "users": 6,
    "inject": {"flips": 9.0},
    "turns": 72, "counts": {RIGHT: 400, LEFT: 30, "resets": 3}, "wrongs": [],
    "faults": {"flips": 30},
    "metrics": {
        "kvoffload_tier_state:on": 1.0, "kvoffload_loaded_blocks_total": 9.0,
        "kvoffload_evicted_blocks_total": 8.0, "kvoffload_mismatched_copies_total": 4.0,
    },
    "samples": [{"at_s": 2.0, "rss_mib": 10.0, "threads": 3.0, "descriptors": 4.0}],
    "growth": {"rss_mib": 3.0, "threads": 0.0, "descriptors": -1.0},
    "ended_after_s": 3.2, "processes_left": [], "files_left": [], "unclean": [],
    "beside": {
        "growth": {"rss_mib": 100.0, "threads": 1.0, "descriptors": 0.0}, "processes_left": [],
        "counts": {RIGHT: 410}, "wrongs": [],
        "samples": [{"at_s": 2.0, "rss_mib": 9.0, "threads": 2.0, "descriptors": 3.0}],
    },
}  # fmt: skip


def test_an_answer_is_judged_by_its_first_token_that_is_another() -> None:
    turn = Turn([1], [5, 6, 7], [2.0, 1e-5, 3.0])
    assert [turn.judge(found) for found in ([5, 6, 7], [5], [])] == [RIGHT] * 3
    assert turn.judge([5, 9, 9]) == TIED
    assert turn.judge([9, 6, 7]) == turn.judge([5, 6, 9]) == WRONG


class FakeServer:
    """Answers with a sum of the prompt; wrong where it is told to."""

    port = 9

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.wrong = self.refuses = False

    def ask(self, prompt: list[int], count: int, **_: Any) -> Iterator[tuple[int, float]]:
        self.asked.append(prompt)
        if self.refuses:
            raise RuntimeError("no")
        for i in range(count):
            yield (sum(prompt) + i + self.wrong) % 1024, 1.0

    def send(self, path: str, body: Any = None) -> Any:
        raise ConnectionRefusedError

    post = send


def test_each_turn_of_the_key_begins_with_all_before_it() -> None:
    server: Any = FakeServer()
    key = answer_key(server, 3, 2)
    for first, second in key:
        assert second.prompt[: len(first.prompt) + ANSWER_TOKENS] == first.prompt + first.answer
    assert answer_key(server, 3, 2) == key, "it is the same each time"


@pytest.mark.parametrize(("wrong", "refuses", "seen"), [
    (False, False, RIGHT), (True, False, WRONG), (False, True, FAILED),
])  # fmt: skip
def test_traffic_finds_what_is_wrong(wrong: bool, refuses: bool, seen: str) -> None:
    server: Any = FakeServer()
    key = answer_key(server, 3, 2)
    server.wrong, server.refuses = wrong, refuses
    traffic = Traffic(server, key, users=2, pressure_gib=0.0, seed=1)
    traffic.start()
    until = time.monotonic() + 60
    while traffic.counts[seen] < 5 and time.monotonic() < until:
        time.sleep(0.02)
    traffic.stop()
    assert traffic.counts[seen] >= 5
    others = {RIGHT, WRONG} - {seen}
    assert sum(traffic.counts[other] for other in others) == 0
    assert bool(traffic.wrongs) == (wrong or refuses or bool(traffic.counts[FAILED]))


def test_conversations_can_be_taken_up_in_turns() -> None:
    server: Any = FakeServer()
    key = answer_key(server, 5, 1)
    server.asked.clear()
    traffic = Traffic(server, key, users=1, pressure_gib=0.0, seed=1, in_turns=True)
    traffic.start()
    until = time.monotonic() + 60
    while len(server.asked) < 12 and time.monotonic() < until:
        time.sleep(0.02)
    traffic.stop()
    prompts = [conversation[0].prompt for conversation in key]
    asked = [prompts.index(prompt) for prompt in server.asked]
    assert len(asked) >= 12 and all((b - a) % 5 in (1, 2) for a, b in zip(asked, asked[1:]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"counts": {RIGHT: 400, WRONG: 1}}, "1 answers wrong"),
        ({"counts": {RIGHT: 400, FAILED: 2}}, "2 answers failed"),
        ({"counts": {RIGHT: 3}}, "expected 20 answers at least, found 3"),
        ({"metrics": {}}, "the tier did not stay on"),
        ({"metrics": {}}, "no block was loaded: the run shows nothing of it"),
        (
            {"growth": {**CLEAN["growth"], "threads": 9.0}},
            "threads grew by 9, plain vLLM's by 1, at most 4 more",
        ),
        (
            {"growth": {**CLEAN["growth"], "rss_mib": 165.0}},
            "rss_mib grew by 165, plain vLLM's by 100, at most 64 more",
        ),
        ({"faults": {}}, "no fault of kind flips was made"),
        ({"ended_after_s": None}, "the server did not end when it was asked to"),
        ({"processes_left": [7]}, "process 7 was left"),
        ({"files_left": ["x"]}, "file x was left in shared memory"),
    ],
)
def test_a_run_is_clean_if_nothing_of_it_is_wrong(change: dict[str, Any], said: str) -> None:
    assert run.faults_of(CLEAN) == []
    assert said in run.faults_of({**copy.deepcopy(CLEAN), **change})


def test_what_plain_vllm_does_as_well_is_not_the_tiers() -> None:
    growth = {"rss_mib": 160.0, "threads": 5.0, "descriptors": 16.0}
    assert run.faults_of({**CLEAN, "growth": growth}) == []
    still = {"rss_mib": 0.0, "threads": 0.0, "descriptors": 0.0}
    beside = {**CLEAN["beside"], "growth": still}
    assert len(run.faults_of({**CLEAN, "growth": growth, "beside": beside})) == 2


def test_options() -> None:
    assert run.options([]).integrity == "sample" and run.options([]).faults == {}
    args = run.options(["--inject", "flips=2,hangs=0.5"])
    assert (args.integrity, args.faults) == ("full", {"flips": 2.0, "hangs": 0.5})
    for wrong in ("flips", "flip=3", "flips=x", "flips=0"):
        with pytest.raises(SystemExit):
            run.options(["--inject", wrong])


def test_growth_is_of_the_second_half() -> None:
    samples = [{"rss_mib": float(value)} for value in [0, 0, 10, 12, 11, 13, 20, 22]]
    assert watch.growth(samples, "rss_mib") == 10.0
    assert watch.growth(samples[:3], "rss_mib") == 0.0


def test_a_process_is_watched_with_all_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "EVERY_S", 0.05)
    code = "import subprocess,sys; subprocess.run([sys.executable, '-c', 'input()'])"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    with watch.Watch(child.pid) as seen:
        until = time.monotonic() + 60
        while len(seen.pids) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        assert len(seen.left()) == 2
    assert child.stdin is not None
    child.communicate(b"\n")
    assert seen.left() == []
    last = seen.samples[-1]
    assert last["processes"] == 2 and last["rss_mib"] > 5 and last["descriptors"] >= 6


def test_faults_are_made_and_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In copies of the package as it is; the modules are put back."""
    for where, name in ((copy_engine, "copies_of"), (SlotMemory, "__init__")):
        monkeypatch.setattr(where, name, getattr(where, name))
    monkeypatch.setattr(faulty, "QUIET_S", 0.0)
    log = tmp_path / "log"
    every = {"flips": 0.01, "raises": 60.0, "hangs": 0.0}
    faults = faulty.Faults(every, str(log))
    faulty.install(faults)
    slots = torch.zeros(2, 4096, dtype=torch.uint8)  # many bits: none is flipped back soon
    SlotMemory(slots)
    until = time.monotonic() + 60
    while not int(slots.sum()) and time.monotonic() < until:
        time.sleep(0.05)
    faults.stop()
    changed = slots.clone()
    time.sleep(3 * faulty.FLIPS_PERIOD_S)
    assert torch.equal(slots, changed) and int(changed.sum()), "none changes once it has returned"
    backend: Any = type("Backend", (), {"load": lambda *a: "loaded", "store": lambda *a: "stored"})
    copies = copy_engine.copies_of(backend)
    with pytest.raises(OSError, match="the soak lets this copy fail"):
        copies["cpu", "gpu"]([1], [2], None, False)
    assert copies["cpu", "gpu"]([1], [2], None, False) == "loaded", "the next one is a while away"
    assert {"flips", "raises"} == set(log.read_text().split())
    assert os.environ.get("SOAK_FAULTS") is None


def test_the_page_has_a_section_for_each_run() -> None:
    dirty = {**CLEAN, "unclean": ["1 answers wrong"], "inject": {}, "ranks": 2}
    in_turns = {**CLEAN, "in_turns": True, "least_share": 0.25}
    found = page.text({"a": CLEAN, "b": dirty, "c": in_turns})
    assert "conversations in turns, flips every 9 s\n" in found
    assert found.count("| least part of a prefix kept on the GPU | 0.25 |\n") == 1
    assert "## 5 min with the tier, flips every 9 s\n\n2026-01-02. Clean. vLLM 1, a CPU, " in found
    assert (
        "## 5 min with the tier, 2 ranks, no faults\n\n2026-01-02. Not clean: 1 answers wrong."
        in found
    )
    assert "| answers right, tied, wrong | 400, 0, 0 |\n" in found
    assert "beside it | 410, 0, 0 |\n" in found
    assert "beside it | 100 rss_mib, 1 threads, 0 descriptors |\n" in found
    assert "(measured/soak/a.png)" in found


def test_the_page_is_that_of_the_recorded_runs() -> None:
    files = sorted(page.FOLDER.glob("*.json"))
    assert files
    assert page.PAGE.read_text() == page.text({f.stem: json.loads(f.read_text()) for f in files})
    found = {file: json.loads(file.read_text()) for file in files}
    drawn = [file for file, run_of in found.items() if "samples" in run_of]
    assert drawn and [file for file in drawn if not file.with_suffix(".png").is_file()] == []


def test_the_page_has_a_row_for_each_target_that_was_fuzzed() -> None:
    about = {**CLEAN["machine"], "atheris": "3", "python": "3.11", "minutes": 2.0}
    good = {"status": 0, "found": [], "number_of_executed_units": 1234, "branches": 5}
    fuzzed = {"patch": good, "config": {**good, "status": 77, "found": ["config-crash-1"]}}
    found = page.text({"b": {"machine": about, "fuzzed": fuzzed}})
    assert re.search(r"\| patch +\| +1,234 \| +5 \|.*\| +nothing \|", found)
    assert re.search(r"\| config +\|.*\| config-crash-1 \|", found)
    assert "`python scripts/soak fuzz --minutes 2`" in found


def test_the_page_has_a_table_of_signals() -> None:
    ended = {"ended_after_s": 2.5, "status": -15, "processes_left": [], "files_left": []}
    ended["package"] = "c"
    sent: Any = {"machine": CLEAN["machine"], "trials": {"idle engine INT": {"plain": ended}}}
    assert "None is worse with the tier." in page.text({"a": CLEAN, "b": sent})
    sent["trials"]["idle engine INT"]["tier"] = {**ended, "ended_after_s": None}
    found = page.text({"a": CLEAN, "b": sent})
    assert "## Signals\n\n2026-01-02, vLLM 1, a CPU, the package of c. Worse with the " in found
    assert "| idle engine INT        | 2.5 s, status -15 | hangs |" in found
    assert "rank0" not in found
    sent["trials"]["idle rank1 INT"] = {}
    found = page.text({"b": sent})
    assert "rank0 and rank1 are the workers of a server with two ranks. The" in found
