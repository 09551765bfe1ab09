"""What `matrix gpu --kinds states` plays, and what it makes of the answers."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine import gpu_kinds, gpu_states, untimed_kernels

UNSTEADY = gpu_states.ROUND
KIND = next(kind for kind in gpu_kinds.KINDS if kind.name == "states: Mamba 2")


def side(**outgrown: Any) -> dict[str, Any]:
    """What an engine has answered."""
    about = {"runner": "r", "scheduler": "Scheduler", "groups": 2}
    answers = {
        "tokens": [[1, 2, 3], [4, 5, 6]], "preemptions": 0, "late": 0, "tier": {"loaded": 0},
    }  # fmt: skip
    return {
        "setup": about,
        "sensitivity": {"tokens": [[1], [2], [3], [4]]},
        "lengths_alone": {"tokens": [[1], [2]], "cached": 640},
        "outgrown": {**answers, **outgrown},
        "one_copy": "",
    }


def tier(**outgrown: Any) -> dict[str, Any]:
    """The same with the tier."""
    return side(**{"preemptions": 3, "late": 9, "tier": {"loaded": 7}, **outgrown})


def few(**outgrown: Any) -> dict[str, Any]:
    """Plain vLLM with as few blocks."""
    return side(**{"preemptions": 2, **outgrown})


def scores(tier: list[float] | None = None, plain: list[float] | None = None) -> dict[str, Any]:
    """How far tokens of their answers are behind the likeliest ones; one answer of each is told."""
    behind = [[answer or [0.0], [0.0, 0.03]] for answer in (tier, plain)]
    return {"outgrown_behind_the_best": {"behind": behind}}


def test_of_several_processes_that_end_the_one_that_says_why_is_named() -> None:
    why = "(EngineCore_DP1 pid=7) ValueError: No room for two."
    waited = "RuntimeError: Engine core initialization failed. See root cause above. {}"
    log = "\n".join([why, *["(ApiServer pid=8)   File x"] * 200, waited, waited])
    kept = gpu_states.end_of(log)
    assert "No room for two." not in log[-3000:] and len(kept) < 3200
    found = gpu_states.ended("off", kept)
    assert found["outcome"] == "skipped" and found["why"].endswith(": ValueError: No room for two.")
    assert gpu_states.ended("off", waited)["why"].endswith(waited)
    assert gpu_states.ended("off", "killed")["why"].endswith(": killed")
    assert gpu_states.ended("on", kept) == {"outcome": "failed", "why": f"on: {kept}"}


def test_each_kind_of_state_is_played_with_both_runners() -> None:
    chosen = gpu_kinds.chosen(["v1", "v2"], ["states:"], 1)
    assert [(runner, kind.name) for runner, kind in chosen] == [
        (runner, f"states: {name}") for runner in ("v1", "v2") for name in gpu_states.KINDS
    ]
    assert len(gpu_states.KINDS) == 5
    others = {kind.name: kind for _, kind in gpu_kinds.chosen(["v1"], ["states "], 2)}
    drafting = others["states with drafts: gated delta net"]
    assert drafting.scenarios == [*gpu_states.SCENARIOS[:3], "guesses_alone", "outgrown"]
    assert not drafting.parts and others["states with hits within a block: gated delta net"].parts
    assert others["states on two stages: gated delta net"].gpus == 2
    assert [name for name, kind in others.items() if kind.unrepeated] == [
        "states on two ranks with a part of each block: gated delta net",
        *(f"states {way}: gated delta net" for way in gpu_states.UNREPEATED),
        "states with n-grams: Mamba 2",
    ]


def test_engines_take_a_kernels_first_configuration_not_the_fastest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    autotuner = pytest.importorskip("triton.runtime.autotuner")

    class Kernel:
        fn = staticmethod(lambda n: n)

        def run(self, *args: int, **configuration: int) -> dict[str, int]:
            return configuration

    def measure(*_args: object, config: Any, **_kwargs: object) -> list[float]:
        return [1 / config.kwargs["BLOCK"]] * 3

    monkeypatch.setattr(autotuner.Autotuner, "prune_configs", autotuner.Autotuner.prune_configs)
    monkeypatch.setattr(autotuner.Autotuner, "_bench", measure)
    # vLLM sets it on import: a measurement is kept in a file, whose name wants a compiled kernel.
    monkeypatch.setattr(autotuner.knobs.autotuning, "cache", False)

    def taken() -> int:
        configurations = [autotuner.Config({"BLOCK": block}) for block in (16, 32)]
        tuned = autotuner.Autotuner(Kernel(), ("n",), configurations, ["n"], None, None)
        found: dict[str, int] = tuned.run(3)
        return found["BLOCK"]

    assert taken() == 32
    untimed_kernels.install()
    assert taken() == 16
    asked = gpu_kinds._environment("0", "v1", KIND, tier=False, few=False)
    assert asked["TEST_UNTIMED_KERNELS"] == "1"


@pytest.fixture
def one_prompt_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_states, "ROUND", 1)


@pytest.mark.usefixtures("one_prompt_a_round")
def test_where_hits_end_within_blocks_plain_vllm_has_longer_ones() -> None:
    kind = replace(KIND, parts=True)
    sides = side(), tier(), few(), scores()
    for one in sides:
        one["lengths_alone"] = {"tokens": [[1], [1]], "cached": 640}
    assert gpu_kinds.compare("v1", kind, *sides)["outcome"] == "failed"
    sides[0]["lengths_alone"]["cached"] = 700
    assert gpu_kinds.compare("v1", kind, *sides)["outcome"] == "passed"


@pytest.mark.usefixtures("one_prompt_a_round")
@pytest.mark.parametrize(
    ("plain", "its", "repeated", "right"),
    [
        ([[1], [1]], [[1], [1]], 2, (True, True)),
        ([[1], [2]], [[1], [1]], 1, (True, True)),
        ([[1], [2]], [[1], [2]], 1, (True, False)),
        ([[1], [2]], [[1], [3]], 1, (False, False)),
        ([[1], [2]], [[2], [3]], 1, (False, False)),
    ],
    ids=["all alike", "the first one again", "as plain vLLM's hit", "neither", "the other first"],
)
def test_where_plain_vllm_does_not_repeat_its_answers_the_tier_gives_one_of_them(
    plain: list[list[int]], its: list[list[int]], repeated: int, right: tuple[bool, bool]
) -> None:
    """And its own first ones where hits of plain vLLM alone end within blocks."""
    sides = side(), tier(), few(), scores()
    for parts, good in zip((False, True), right):
        sides[0]["lengths_alone"] = {"tokens": plain, "cached": 700 if parts else 640}
        sides[1]["lengths_alone"] = {"tokens": its, "cached": 640}
        found = gpu_kinds.compare("v1", replace(KIND, parts=parts, unrepeated=True), *sides)
        assert found["plain_repeated"] == repeated
        assert (found["outcome"] == "passed") == good


def test_beside_drafts_some_must_be_accepted() -> None:
    for accepted, outcome in ((3, "passed"), (0, "failed")):
        on = {**tier(), "guesses_alone": {"counted": [[0, 9, 3], [0, 9, accepted]]}}
        assert gpu_kinds.compare("v1", KIND, side(), on, few(), scores())["outcome"] == outcome


def test_answers_must_be_equal_and_what_was_seen_is_told() -> None:
    found = gpu_kinds.compare("v1", KIND, side(), tier(), few(), scores())
    assert found["outcome"] == "passed" and found["answers_equal"] == found["answers"] == 2
    assert (found["blocks_loaded"], found["preemptions"], found["held_up"]) == (7, 3, 9)
    assert (found["outgrown"], found["outgrown_equal"], found["cached"]) == (2, 2, [640, 640])


@pytest.mark.parametrize(
    ("off", "on", "outcome"),
    [
        (side(), tier(tokens=[[1, 2, 3], [4, 9, 9]]), True),
        (side(), tier(preemptions=0), False),
        (side(preemptions=1), tier(), False),
        (side(), tier(late=0), False),
        (side(), tier(tier={"loaded": 0}), False),
        ({**side(), "lengths_alone": {"tokens": [[1], [2]], "cached": 512}}, tier(), False),
        (side(), {**tier(), "lengths_alone": {"tokens": [[1], [3]], "cached": 640}}, False),
    ],
    ids=[
        "another answer together", "no preemption", "a full GPU beside it",
        "nothing held up", "nothing loaded", "other hits", "another answer alone",
    ],
)  # fmt: skip
def test_what_must_hold(off: dict[str, Any], on: dict[str, Any], outcome: bool) -> None:
    found = gpu_kinds.compare("v2", KIND, off, on, few(), scores())
    assert found["outcome"] == ("passed" if outcome else "failed")


@pytest.mark.usefixtures("one_prompt_a_round")
@pytest.mark.parametrize(
    ("other", "compared", "first"),
    [((), (2, 2), 1), ((0,), (2, 2), 0), ((2,), (2, 1), 1)],
    ids=["all equal", "one of the first", "a later one"],
)
def test_first_answers_are_counted_where_plain_vllm_does_not_repeat_them(
    other: tuple[int, ...], compared: tuple[int, int], first: int
) -> None:
    """Of three answers one is of the first round."""
    kind = next(kind for kind in gpu_kinds.KINDS if kind.name == "states: linear attention")
    assert kind.unsteady == UNSTEADY
    sides = side(), tier(), few(), scores()
    for one in sides:
        one["lengths_alone"] = {"tokens": [[1], [1], [1]], "cached": 640}
    for at in other:
        sides[1]["lengths_alone"]["tokens"][at] = [9]
    found = gpu_kinds.compare("v1", replace(kind, unsteady=1), *sides)
    assert found["outcome"] == ("passed" if compared == (2, 2) else "failed")
    assert (found["answers"], found["answers_equal"]) == compared
    assert (found["first"], found["plain_first_equal"], found["first_equal"]) == (1, 1, first)


@pytest.mark.parametrize(
    ("its", "plain", "outcome"),
    [
        ([0.19], [0.0], True),
        ([0.21], [0.0], False),
        ([0.21], [0.22], True),
        ([0.1] * 10, [0.0], True),
        ([0.1] * 11, [0.0], False),
        ([0.1] * 15, [0.1] * 4, True),
    ],
    ids=["rounding", "a token", "a token of plain's", "many", "too many", "as many as plain's"],
)
def test_answers_together_are_about_as_near_to_the_likeliest_as_those_of_plain_vllm(
    its: list[float], plain: list[float], outcome: bool
) -> None:
    found = gpu_kinds.compare("v1", KIND, side(), tier(), few(), scores(its, plain))
    assert (found["outcome"] == "passed") == outcome
    assert (found["behind"], found["plain_behind"]) == ([max(its), 0.03], [max(plain), 0.03])
    assert found["behind_in_all"] == pytest.approx(sum(its) + 0.03)


def test_plain_vllm_must_have_been_pressed_as_well() -> None:
    again = few(preemptions=0)
    assert gpu_kinds.compare("v1", KIND, side(), tier(), again, scores())["outcome"] == "failed"


def test_plain_vllm_computes_the_answers_of_both_engines_with_few_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(gpu_kinds, "play", lambda *given, **sides: asked.append((*given, sides)))
    sides: list[Future[dict[str, Any]]] = [Future(), Future()]
    sides[0].set_result(tier())
    sides[1].set_result({"error": "ended"})
    kind = replace(KIND, engine={**KIND.engine, "speculative_config": {"method": "mtp"}})
    gpu_kinds._score((Path("/models"), "0", "v1", kind), sides)
    ((folder, gpus, runner, scoring, which),) = asked
    assert (folder, gpus, runner) == (Path("/models"), "0", "v1")
    assert which == {"tier": False, "few": False}
    assert scoring.scenarios == ["outgrown_behind_the_best"] and scoring.engine == KIND.engine
    told = gpu_kinds._environment("0", "v1", scoring, **which)
    assert json.loads(told["TEST_ANSWERS"]) == [[[1, 2, 3], [4, 5, 6]], []]
    assert told["TEST_UNTIMED_KERNELS"] == "1"


def test_that_plain_vllm_ends_is_no_fault_of_the_tier() -> None:
    log = "x\n(EngineCore pid=7) ValueError: mode align\nRuntimeError: no such kernel\nmore"
    for off, again in (({"error": log}, few()), (side(), {"error": log})):
        found = gpu_kinds.compare("v1", KIND, off, tier(), again)
        assert found["outcome"] == "skipped"
    assert found["why"] == "plain vLLM ends by itself: RuntimeError: no such kernel"
    found = gpu_kinds.compare("v1", KIND, side(), {"error": log}, few())
    assert (found["outcome"], found["why"]) == ("failed", f"on: {log}")


@pytest.mark.parametrize("by", ["", "(EngineCore pid=7) "])
def test_of_a_configuration_that_plain_vllm_refuses_the_reason_is_said(by: str) -> None:
    log = (
        f"{by}pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n"
        f"{by}  Assertion failed, no align mode. [type=assertion_error, input_value=ArgsKwargs()]\n"
        f"{by}    For further information visit"
    )
    found = gpu_kinds.compare("v2", KIND, {"error": log}, tier(), few())
    assert found["why"] == "plain vLLM ends by itself: no align mode."


@pytest.mark.usefixtures("one_prompt_a_round")
@pytest.mark.parametrize(
    ("plain", "outcome"),
    [([[1], [2], [3]], "skipped"), ([[1], [2], [1]], "passed")],
    ids=["never", "once"],
)
def test_where_plain_vllm_answers_wrongly_behind_each_of_its_hits_nothing_is_compared(
    plain: list[list[int]], outcome: str
) -> None:
    sides = side(), tier(), few(), scores()
    for one in sides:
        one["lengths_alone"] = {"tokens": plain, "cached": 640}
    found = gpu_kinds.compare("v1", KIND, *sides)
    assert found["outcome"] == outcome
    if outcome == "skipped":
        assert found["why"].startswith("plain vLLM by itself answers none of 2 prompts as before")
    assert gpu_kinds.compare("v1", replace(KIND, unrepeated=True), *sides)["outcome"] == "passed"


@pytest.mark.usefixtures("one_prompt_a_round")
def test_nor_where_two_plain_engines_do_not_give_one_answer_alike() -> None:
    sides = side(), tier(), few(), scores()
    for n, one in enumerate(sides[:3]):
        one["lengths_alone"] = {"tokens": [[n], [n], [n]], "cached": 640}
    found = gpu_kinds.compare("v1", KIND, *sides)
    assert found["outcome"] == "skipped" and "no prompt alike in two engines" in found["why"]


@pytest.mark.usefixtures("one_prompt_a_round")
def test_nor_where_plain_vllm_answers_with_one_token_over_and_over() -> None:
    """Also where its answers need not be its own of another round; of the tier's it is said."""
    kind = replace(KIND, unrepeated=True)
    stuck = {"tokens": [[7] * 12, [1] * 4, [1] * 4], "cached": 640}
    outcomes = []
    for at in range(3):
        sides = [side(), tier(), few(), scores()]
        for n, one in enumerate(sides[:3]):
            one["lengths_alone"] = stuck if n == at else {**stuck, "tokens": [[1] * 4] * 3}
        found = gpu_kinds.compare("v2", kind, *sides)
        outcomes.append((found["outcome"], "over and over" in found.get("why", "")))
    assert outcomes == [("skipped", True), ("failed", False), ("skipped", True)]


def test_the_tier_is_asked_to_try_what_nobody_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def run(*given: Any, **_: Any) -> Any:
        asked.append(given)
        return SimpleNamespace(results={}, log="")

    monkeypatch.setattr(gpu_kinds.engines, "run", run)
    for which in gpu_kinds._sides(KIND):
        gpu_kinds.play(Path("/models"), "0", "v1", KIND, *which)
    (scenarios, plain, no_tier, at_once), (_, pressed, settings, late), control = asked
    assert control == (scenarios, pressed, no_tier, at_once)
    assert scenarios == gpu_states.SCENARIOS and (no_tier, at_once) == (None, 0)
    assert settings["KVOFFLOAD_ALLOW_UNVERIFIED"] == "1" and late == "device"
    assert plain["mamba_cache_mode"] == "align" and plain["enable_prefix_caching"]
    blocks = [one["num_gpu_blocks_override"] for one in (plain, pressed)]
    assert blocks == list(gpu_states.BLOCKS) and blocks[0] > 8 * blocks[1]


def test_the_weights_of_linear_attention_are_those_that_its_configuration_has_room_for(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch")
    from engine import linear_attention
    from safetensors.torch import load_file

    folder = linear_attention.write(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    layers = [name.split(".")[2] for name in weights if ".query_key_value." in name]
    assert layers == ["0", "2"] and config["layer_group_size"] == 2
    inner = config["num_attention_heads"] * config["head_dim"]
    assert weights["model.layers.0.attention.query_key_value.weight"].shape[0] == 3 * inner
    latent = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    assert weights["model.layers.1.attention.kv_a_proj_with_mqa.weight"].shape[0] == latent


@pytest.mark.parametrize("seed", range(4))
def test_copies_of_a_gpu_are_held_up_on_both_streams(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from engine import late_copies
    from transfer.fake_cuda import FakeCuda

    from kvoffload_patch.transfer import engine

    log: list[str] = []
    on: list[Any] = []
    monkeypatch.setattr(engine, "CopyQueue", engine.CopyQueue)  # put back at the end
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(on.append(stream)))
    monkeypatch.setattr(
        torch.cuda, "_sleep", lambda _: on[-1].append(partial(log.append, "held")), raising=False
    )
    late_copies.install("device")
    before = late_copies.held_up()
    with FakeCuda(seed) as cuda:
        queue = engine.CopyQueue(cuda, threading.RLock(), ends_on_bus=False, slices_ahead=2)

        def copy(streams: Any) -> Any:
            streams.bus.append(partial(log.append, "bus"))
            streams.blocks.append(partial(log.append, "blocks"))
            yield

        for ticket in (1, 2):
            queue.submit(ticket, copy, [])
        queue.flush(2)
        cuda.run()
    assert late_copies.held_up() - before == 2
    for stream in ("bus", "blocks"):
        seen = [entry for entry in log if entry in ("held", stream)]
        behind = [seen[:at].count("held") for at, entry in enumerate(seen) if entry == stream]
        assert behind[0] >= 1 and behind[1] == 2, "a copy was not held up"
