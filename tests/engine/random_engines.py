"""Random runs over real engines: `random_engines.py SEED SECONDS`, seed after seed for so long.

One run is one seed, whose plan `random_plan` makes. Plain vLLM is asked for each answer, with
nothing that disturbs it; then an engine with the tier is asked for all of them while it is
disturbed (`random_engine`). What it answers must be the same, it must come to its end, and nothing
may be left behind.

Of a run that fails, a plain engine is disturbed in the same way: what it answers otherwise as well
is vLLM's own, and its combination belongs to those that a plan leaves out. Where neither comes to
its end it counts as no failure: sessions that wait keep their blocks, and on a small GPU several
may wait for each other's for ever.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from functools import cache
from itertools import starmap
from math import isnan
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[:0] = [str(_TESTS.parent), str(_TESTS)]

from engine import engines, random_plan  # noqa: E402

# Of the natural logs: what is nearer is equally likely, and rounding decides.
_EQUAL = 0.001
_FAR = 0.05
_WINDOW = 64  # tokens, beside full attention
_SHOWN = 6  # differences of a run
# What plain vLLM is not asked with: nothing disturbs it, and drafts change no answer.
_LEFT_OUT = (
    "speculative_config", "scheduling_policy", "kv_events_config", "long_prefill_token_threshold",
    "enable_chunked_prefill", "kv_transfer_config", "tensor_parallel_size",
    "disable_hybrid_kv_cache_manager",
)  # fmt: skip
_UNDISTURBED = {
    "num_gpu_blocks_override": 700, "async_scheduling": False, "max_num_batched_tokens": 512,
}  # fmt: skip


class Models:
    """The arguments of engines that say where a model of a kind is.

    Args:
        real: writes models, and starts engines on them (`conftest.Engines`).
    """

    def __init__(self, real: Any) -> None:
        self._real = real
        self._drafts, self._llava = cache(real.drafts), cache(real.llava)

    def arguments(self, plan: random_plan.Plan) -> dict[str, Any]:
        """All arguments of the engine of a plan."""
        engine, kind = dict(plan.engine), plan.kind
        window = _WINDOW if "windows" in plan.has else 0
        if kind == "window" or (window and kind in ("lora", "embeds")):
            engine["model"] = self._real.narrow
        elif kind == "images":
            engine["model"] = self._llava(window)
        elif kind == "states":
            engine["model"] = self._real.architecture("lfm2")
        elif kind in random_plan.DRAFTS:
            engine["model"] = self._drafts(window)["mtp" if kind == "mtp" else "target"]
        if kind == "eagle3":
            drafting = engine["speculative_config"]
            engine["speculative_config"] = drafting.replace(
                random_plan.FOLDER, self._drafts(window)["eagle3"]
            )
        return engine


def play(real: Any, models: Models, seed: int) -> tuple[Counter[str], list[str]]:
    """One run; what was seen in it, and what was wrong."""
    plan = random_plan.plan(seed)
    engine = models.arguments(plan)
    env = {"TEST_RANDOM": str(seed), "TEST_LORAS": os.pathsep.join(real.loras), **plan.env}
    of_plain = {name: value for name, value in env.items() if name != "TEST_FLIP_STORES"}
    of_all = {name: value for name, value in engine.items() if name not in _LEFT_OUT}
    right = real.off(["asked_alone"], {**of_all, **_UNDISTURBED}, **of_plain)
    tier = {"KVOFFLOAD_RECOMPUTE": "auto", **plan.tier}  # answers are the same either way
    run = real.on(["played_at_random"], engine, tier, plan.late, **env)
    wrong = _wrong(right, run)
    if wrong:
        plain = real.off(["played_at_random"], engine, **of_plain)
        if random_plan.NO_END in run.log and random_plan.NO_END in plain.log:
            return Counter({random_plan.NO_END: 1}), []
        also = _wrong(right, plain)
        wrong = [*wrong[:_SHOWN], f"plain vLLM: {also[:_SHOWN] or 'as it should be'}"]
    return Counter(run.results.get("played_at_random", {}).get("seen", {})), wrong


def _wrong(right: engines.Run, run: engines.Run) -> list[str]:
    """What a run that was disturbed has answered wrongly, or left behind."""
    for one, name in ((right, "asked_alone"), (run, "played_at_random")):
        if name not in one.results:
            return [f"{name} ended with status {one.returncode}: {one.log[-1500:]}"]
    return differences(right["asked_alone"], run["played_at_random"])


def differences(right: dict[str, Any], played: dict[str, Any]) -> list[str]:
    """A line for each answer that is not as plain vLLM has it, and for each thing left behind.

    Args:
        right: by request, by sample, its whole answer; behind " second", with the second weights.
        played: what `random_engine.played_at_random` returns; ``second``: who was answered with the
            second set of weights.
    """
    found = list(played["left"])
    for name, answers in played["answers"].items():
        weights = " second" if name in played.get("second", ()) else ""
        whole, done = right[name.split()[0] + weights], played["states"][name] == "done"
        if done and answers.keys() != whole.keys():
            found.append(f"{name}: samples {list(answers)}, not {list(whole)}")
        for index, answer in answers.items():
            why = _difference(whole[index], answer, done)
            found += [f"{name}, sample {index}: {why}"] if why else []
    return found


def _difference(right: dict[str, Any], answer: dict[str, Any], done: bool) -> str:
    tokens, whole = answer["tokens"], right["tokens"]
    pairs = enumerate(zip(tokens, whole))
    other = next((at for at, (one, another) in pairs if one != another), None)
    if other is not None:
        return "" if _equally_likely(right, other) else f"token {other} of {tokens}, not {whole}"
    if len(tokens) > len(whole) or (done and len(tokens) < len(whole)):
        return f"{len(tokens)} tokens, not {len(whole)}"
    if not done:
        return ""
    if answer.get("reason") != right.get("reason"):
        return f"ended by {answer.get('reason')}, not {right.get('reason')}"
    for name in ("logprobs", "prompt_logprobs"):
        if name == "logprobs" and not answer.get(name):
            continue  # plain vLLM is asked for all
        if not _near(answer.get(name), right.get(name)):
            return f"other {name}: {answer.get(name)}, not {right.get(name)}"
    return ""


def _equally_likely(right: dict[str, Any], at: int) -> bool:
    likely = right.get("logprobs")
    best = sorted(likely[at].values(), reverse=True)[:2] if likely else []
    return len(best) == 2 and best[0] - best[1] < _EQUAL


def _near(ones: Any, others: Any) -> bool:
    """Whether two lists are of the same places, and tokens that both have are as likely."""
    if not ones or not others:
        return not ones and not others
    shared = (
        (one[token], other[token])
        for one, other in zip(ones, others)
        for token in one.keys() & other.keys()
    )
    return len(ones) == len(others) and all(starmap(_as_likely, shared))


def _as_likely(one: float, other: float) -> bool:
    """Also of tokens that a grammar excludes, and of all of them behind its end: no number."""
    return one == other or abs(one - other) < _FAR or (isnan(one) and isnan(other))


def main(seed: str, seconds: str) -> int:
    """Run seed after seed for so long, and print what came out."""
    from engine.conftest import Engines

    failed: dict[int, list[str]] = {}
    seen: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        real = Engines(Path(folder), Path(folder))
        models, at, end = Models(real), int(seed), time.monotonic() + float(seconds)
        while at == int(seed) or time.monotonic() < end:
            began = time.monotonic()
            try:
                found, wrong = play(real, models, at)
            except TimeoutError as error:
                found, wrong = Counter(), [str(error)]
            seen.update(found)
            if wrong:
                failed[at] = wrong
            _tell(at, found, wrong, time.monotonic() - began)
            at += 1
        real.close()
    print(summary(at - int(seed), seen, failed))
    return int(bool(failed))


def _tell(seed: int, seen: Counter[str], wrong: list[str], seconds: float) -> None:
    counts = ", ".join(f"{seen[name]} {name}" for name in ("stored", "loaded", "preempted"))
    likeness = ", ".join(random_plan.plan(seed).likeness())
    verdict = "FAILED" if wrong else "no end" if seen[random_plan.NO_END] else "right"
    print(f"{seed}: {verdict}, {seconds:.0f} s, {counts} ({likeness})", flush=True)


def summary(runs: int, seen: Counter[str], failed: dict[int, list[str]]) -> str:
    """What was seen, what never was, and each run that failed."""
    lines = [f"{runs} runs, {len(failed)} failed"]
    for title, names in (
        ("runs", [f"run: {name}" for name in random_plan.LIKENESSES]),
        ("requests answered in full", list(random_plan.ASKED)),
        ("what happened", list(random_plan.EVENTS)),
    ):
        counts = ", ".join(f"{name.removeprefix('run: ')} {seen[name]}" for name in names)
        lines.append(f"{title}: {counts}")
        never = [name.removeprefix("run: ") for name in names if not seen[name]]
        lines += [f"    NEVER: {', '.join(never)}"] if never else []
    for seed, wrong in failed.items():
        lines += [f"seed {seed}:", *(f"    {one}" for one in wrong)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
