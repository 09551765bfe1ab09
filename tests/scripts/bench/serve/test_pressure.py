"""`pressure` of `scripts/bench serve` with an engine that is made up: what is asked and counted."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.bench.serve import job as job_of
from scripts.bench.serve import load, pressed, pressure, report
from scripts.bench.serve.sizes import SMALL, Sizes

CROWD = pressure.Crowd(chats=3, history=40, new=5, answers=(2, 4), turns=2, vocabulary=1000)


class Engine:
    """Two requests at a time, a token a step; every third step it preempts nobody but counts one.

    It computes a prompt at once, and of one that goes on with what it knows the rest alone, but for
    ``waste`` tokens a request.
    """

    def __init__(self, waste: int) -> None:
        self.scheduler = SimpleNamespace(
            schedule=self._schedule,
            kv_cache_manager=SimpleNamespace(block_pool=SimpleNamespace(num_gpu_blocks=3)),
        )
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=self.scheduler))
        self.requests: dict[str, list[Any]] = {}
        self.preempted, self.most, self._waste = 0, 0, waste
        self._known: dict[str, int] = {}

    def take(self, engine: Any, name: str, prompt: list[int], answer: int) -> None:
        self.requests[name] = [prompt, answer, 0]
        self.most = max(self.most, len(self.requests))

    def _schedule(self) -> Any:
        tokens = 0
        for name, (prompt, _, given) in list(self.requests.items())[:2]:
            chat = name.split("-")[0]
            known = self._known.get(chat, 0)
            tokens += 1 if given else len(prompt) - known + self._waste
            self._known[chat] = len(prompt) + given
        return SimpleNamespace(total_num_scheduled_tokens=tokens)

    def step(self) -> list[Any]:
        self.scheduler.schedule()
        self.preempted += 1
        outputs = []
        for name, request in list(self.requests.items())[:2]:
            request[2] += 1
            over = request[2] == request[1]
            answer = SimpleNamespace(token_ids=[len(request[0]) + request[2]])
            outputs.append(SimpleNamespace(request_id=name, outputs=[answer], finished=over))
            if over:
                del self.requests[name]
        return outputs


@pytest.fixture
def playing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A made-up engine, and what plays on it."""

    def make(waste: int = 0, plain: bool = False) -> tuple[Engine, load.Bench]:
        engine = Engine(waste)
        monkeypatch.setattr(pressure, "ask", engine.take)

        def metrics() -> list[Any]:
            other = SimpleNamespace(name="vllm:prompt_tokens", value=99)
            return [other, SimpleNamespace(name="vllm:num_preemptions", value=engine.preempted)]

        llm = SimpleNamespace(
            llm_engine=engine, get_metrics=metrics, reset_prefix_cache=engine._known.clear
        )
        bench = load.Bench(llm, SMALL, lambda text: None, plain=plain)
        monkeypatch.setattr(bench, "generate", lambda texts, tokens: (0.0, []))
        return engine, bench

    yield make


@pytest.mark.parametrize("waste", [0, 7])
def test_what_is_computed_over_the_least_is_recomputed(playing, waste):
    engine, bench = playing(waste)
    found = pressure.play(bench, CROWD)
    chats = pressure.chats_of(CROWD)
    answered = sum(sum(chat.lengths) for chat in chats)
    needed = 3 * (40 + 5) + answered - 3  # the last token of a chat is not computed
    assert found["requests"] == 6 and engine.most == 3
    assert found["computed"] == needed + 6 * waste
    assert found["recomputed"] == 6 * waste
    assert found["times_the_cache"] == pytest.approx(needed / (2 * SMALL.block_size))
    assert found["preemptions"] == engine.preempted > 0
    assert [[len(a) for a in each] for each in found["answers"]] == [c.lengths for c in chats]
    assert engine.scheduler.schedule == engine._schedule, "the scheduler is left as it was"


def test_a_turn_begins_with_all_that_was_said(playing, monkeypatch):
    engine, bench = playing()
    asked: dict[str, list[int]] = {}

    def take(core: Any, name: str, prompt: list[int], answer: int) -> None:
        asked[name] = prompt
        engine.take(core, name, prompt, answer)

    monkeypatch.setattr(pressure, "ask", take)
    answers = pressure.play(bench, CROWD)["answers"]
    assert sorted(asked) == [f"{chat}-{turn}" for chat in range(3) for turn in range(2)]
    for chat in range(3):
        first, second = asked[f"{chat}-0"], asked[f"{chat}-1"]
        assert second[: len(first)] == first
        assert second[len(first) : -5] == answers[chat][0]


def test_the_longest_wait_is_to_a_first_token_or_between_two(playing, monkeypatch):
    times = iter(float(2**number) for number in range(100))
    _, bench = playing()
    monkeypatch.setattr(pressure.time, "perf_counter", lambda: next(times))
    one = pressure.Crowd(1, 40, 5, (3, 3), 1, 1000)
    found = pressure.play(bench, one)
    # Begun at 1 s, asked for at 2, tokens at 4, 8 and 16.
    assert (found["first_max"], found["longest_wait"], found["seconds"]) == (2.0, 8.0, 31.0)
    assert found["longest_wait_steps"] == 1, "alone, a request gets a token in every step"


def test_the_longest_wait_in_steps_has_those_before_the_first_token(playing):
    _, bench = playing()
    found = pressure.play(bench, pressure.Crowd(3, 40, 5, (3, 3), 1, 1000))
    # Two at a time: the third one's first token comes in the step after their last.
    assert (found["longest_wait_steps"], found["steps"]) == (4, 6)


def test_plain_vllm_alone_answers_one_chat_at_a_time(playing, monkeypatch):
    monkeypatch.setattr(pressure, "crowd_of", lambda bench, small_model: CROWD)
    engine, bench = playing(plain=True)
    found = pressure.pressure_tokens(bench)
    assert engine.most == 3 and found["alone"] == found["answers"]
    engine, bench = playing()
    under = pressure.pressure_tokens(bench)
    assert "alone" not in under and under["answers"] == found["alone"]
    assert "answers" not in pressure.pressure(bench)


@pytest.mark.parametrize("sizes", [Sizes(), SMALL])
@pytest.mark.parametrize("small_model", [False, True])
def test_the_chats_need_three_times_the_cache_and_more_than_it_at_once(sizes, small_model):
    bench = load.Bench(None, sizes, lambda text: None)
    crowd = pressure.crowd_of(bench, small_model)
    blocks = sizes.pressure_tokens_gpu_blocks if small_model else sizes.pressure_gpu_blocks
    longest = sizes.tokens_max_model_len if small_model else sizes.max_model_len
    chats = pressure.chats_of(crowd)
    ends = [crowd.history + 2 * crowd.new + sum(chat.lengths) for chat in chats]
    cache = (blocks - 1) * sizes.block_size
    assert 3 <= sum(ends) / cache < 3.4
    assert max(ends) <= min(longest, cache)
    admitted = min(cache // crowd.history, sizes.max_num_seqs)
    grown = sorted(crowd.history + chat.lengths[0] for chat in chats)[:admitted]
    assert sum(grown) > cache, "the first answers alone make vLLM preempt"
    tier = sizes.pressure_cpu_gib * (1 << 30) / (2 << 20) * sizes.block_size
    assert small_model or sizes is SMALL or tier > sum(ends), "the tier holds all of it"


def test_its_engine_runs_in_the_process_that_reads_the_scheduler(tmp_path):
    setup = job_of.Setup(tmp_path, SMALL, True, {}, tmp_path, 5.0)
    for engine, own in (("pressure", True), ("pressure_tokens", True), ("main", False)):
        job = job_of.Job("off", engine, [], 1)
        launch = job.launch(setup, tmp_path / "spec", tmp_path / "events")
        found = launch.environment.get("VLLM_ENABLE_V1_MULTIPROCESSING")
        assert (found == "0") == own
        assert (job_of.arguments(job, setup).get("disable_log_stats") is False) == own
    assert [job.name for (job,) in job_of.jobs(["pressure"], ["off", "ours"], 1)] == [
        "pressure-off-1", "pressure-ours-1",
    ]  # fmt: skip


def record(mode: str, **results: Any) -> dict[str, Any]:
    return {
        "mode": mode, "engine": "pressure", "results": results, "start_s": 1.0, "round": 1,
        "error": "",
    }  # fmt: skip


def figures(recomputed: int, wait: float) -> dict[str, Any]:
    found = dict.fromkeys((key for key, _, _ in pressed.ROWS), 1.0)
    return {**found, "recomputed": recomputed, "longest_wait": wait}


def test_the_report_has_each_mode_beside_the_others():
    jobs = [
        record("off", pressure=figures(90_000, 4.0)),
        record("ours", pressure=figures(10_000, 3.0)),
        record("ours+KVOFFLOAD_STORE=auto", pressure=figures(30_000, 5.0)),
        record("simple", pressure=figures(20_000, 9.0)),
    ]
    text = report.text({"jobs": jobs, "machines": []})
    assert "ok    pressure, recomputed, ours over simple: 0.5, at most 1" in text
    auto = "ours+KVOFFLOAD_STORE=auto"
    assert f"MISS  pressure, recomputed, {auto} over simple: 1.5, at most 1" in text
    assert "ok    pressure, longest wait, ours over off: 0.75" in text
    assert f"MISS  pressure, longest wait, {auto} over off: 1.25" in text
    row = next(line for line in text.splitlines() if "recomputed (thousand" in line)
    assert [cell.split()[0] for cell in row.split("|")[2:-1]] == ["90", "10", "30", "20"]


def test_answers_count_up_to_the_first_that_differs():
    alone = [[[1], [2], [3]], [[4], [5], [6]]]
    under = {"recomputed": 1000, "preemptions": 3}
    jobs = [
        record("off", pressure_tokens={"answers": alone, "alone": alone, **under}),
        record("ours", pressure_tokens={"answers": [[[1], [0], [3]], alone[1]], **under}),
    ]
    lines = pressed.answers(jobs)
    assert lines[1:3] == [
        "  off: 6 of 6 equal, 1,000 tokens recomputed, 3 preemptions",
        "  ours: 4 of 6 equal, 1,000 tokens recomputed, 3 preemptions",
    ]
    assert pressed.answers(jobs[1:]) == []


def test_answers_are_written_as_digests_that_differ_with_a_token():
    assert pressure.digest([1, 2]) == pressure.digest([1, 2])
    others = ([1, 3], [12], [1, 2, 2], [])
    assert len({pressure.digest([1, 2]), *map(pressure.digest, others)}) == 5


def test_the_page_of_the_small_model_has_all_rounds():
    alone = [["a", "b"], ["c", "d"]]
    found = dict.fromkeys((key for key, _ in pressed.SMALL_ROWS), 7)
    jobs = [
        record("off", pressure_tokens={**found, "answers": alone, "alone": alone}),
        record("ours", pressure_tokens={**found, "answers": [["a", "b"], ["x", "d"]]}),
        record("ours", pressure_tokens={**found, "answers": alone, "recomputed": 1500}),
        record("ours", pressure_tokens={**found, "answers": alone, "recomputed": 20}),
        record("simple"),
    ]
    text = pressed.small_page(jobs, {"off": "no tier", "ours": "this tier", "simple": "Simple"})
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert rows[0][1:] == ["no tier", "this tier"]
    assert ["recomputed, tokens", "7 (7 to 7)", "20 (7 to 1500)"] in rows
    assert rows[-1] == [
        "answers equal to one chat at a time's, of 4", "4 (4 to 4)", "4 (2 to 4)",
    ]  # fmt: skip


def test_the_page_has_the_median_of_each_mode():
    found = {key: 2000.0 for key, *_ in pressed.ROWS}
    jobs = [{"mode": "ours", "results": {"pressure": {**found, "preemptions": n}}} for n in (1, 5)]
    jobs.append({"mode": "simple", "results": {}})
    text = pressed.page(jobs, {"off": "no tier", "ours": "this tier", "simple": "Simple"})
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert rows[0] == ["chats, all at once", "this tier", "Simple"]
    assert ["preemptions", "3", "-"] in rows
    assert ["recomputed (thousand tokens)", "2", "-"] in rows


def test_on_a_gpu_answers_that_are_compared_do_not_depend_on_their_batches(tmp_path):
    for small, engine, alone in (
        (False, "pressure_tokens", True), (True, "pressure_tokens", False),
        (False, "pressure", False),
    ):  # fmt: skip
        setup = job_of.Setup(tmp_path, SMALL, small, {}, tmp_path, 5.0)
        launch = job_of.Job("ours", engine, [], 1).launch(setup, tmp_path / "spec", tmp_path / "e")
        assert (launch.environment.get("VLLM_BATCH_INVARIANT") == "1") == alone
