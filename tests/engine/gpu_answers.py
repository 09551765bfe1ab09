"""What engines of `gpu_kinds` have answered, plain ones and one with the tier: is it the same?"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from engine import gpu_nodes, gpu_states

if TYPE_CHECKING:
    from engine.gpu_kind import Kind

SLEEPS, STATES, FLIPPED = "sleeps_twice", "lengths_alone", "flipped_bits"
COMMANDED, BEHIND = "commanded", "outgrown_behind_the_best"
# What the tier keeps through sleep, and what it must not, as the scenario names it.
KEPT = ("level 1", "level 1, three times", "level 0", "other weights, level 1")
LOST = ("first", "other weights", "level 2", "reset")
# What the tier has when it was told something, and what it must not have.
HAD = ("stored", "resumed", "larger, stored", "emptied, stored")
NOT_HAD = ("first", "paused", "emptied")
DIFFERING = 6  # of answers that differ so many are told: plain vLLM's and the tier's
Answers = dict[str, Any]  # of an engine, by scenario; or what was made of two


def compare(runner: str, kind: Kind, off: Answers, on: Answers, *few: Answers) -> Answers:
    """A plain engine and one with the tier: is every answer the same?

    ``few``: of models that keep states, a plain engine with as few blocks as that with the tier;
    beside LMCache, one with as few and LMCache, without the tier.
    """
    found: dict[str, Any] = {"name": f"{runner}, {kind.name}"}
    for side, results in (("off", off), *(("off", plain) for plain in few), ("on", on)):
        if "error" in results:
            return {**found, **_ended(side, results["error"])}
    if why := _wrong_alone(kind, off, *few):
        return {**found, "outcome": "skipped", "why": why}
    if kind.asked in gpu_nodes.LOST:
        return {**found, **gpu_nodes.judge(kind.name, kind.asked, off, on)}
    of_its_own = {SLEEPS: _after_sleep, COMMANDED: _after_commands}.get(kind.asked)
    pairs = of_its_own(off, on) if of_its_own else _alike(kind, off, on)[kind.unsteady :]
    about = on.get("setup", {})
    last = on[kind.scenarios[-1]]
    found.update(
        runner=(about or last)["runner"],
        answers=len(pairs),
        answers_equal=sum(a == b for a, b in pairs),
        blocks_loaded=last["tier"]["loaded"] if "tier" in last else last["loaded"] // 16,
    )
    if other := [(at, a, b) for at, (a, b) in enumerate(pairs) if a != b]:
        found["differ"] = other[:DIFFERING]
    good = [found["answers_equal"] == len(pairs), found["blocks_loaded"] > 0]
    good.append((on.get("by_layer", False), on["one_copy"]) == kind.says)
    if about:
        found.update(scheduler=about["scheduler"], groups=about["groups"])
        told_apart = {tuple(answer) for answer in off["sensitivity"]["tokens"]}
        good += [found["groups"] == kind.groups, len(told_apart) == 4]
    if "batches" in on:
        batched = list(zip(off["batches"]["tokens"], on["batches"]["tokens"]))
        found.update(batched=len(batched), batched_equal=sum(a == b for a, b in batched))
        good.append(not kind.exact or found["batched_equal"] == len(batched))
    if kind.asked == STATES:
        good += gpu_states.judge(off, on, *few, found, kind.parts)
    good += _of_its_own(kind, off, on, found)
    return {**found, "outcome": "passed" if all(good) else "failed"}


def _alike(kind: Kind, off: Answers, on: Answers) -> list[tuple[Any, Any]]:
    plain, its = (side[kind.asked]["tokens"] for side in (off, on))
    if kind.unrepeated:
        plain = gpu_states.one_of(plain, its)
    return list(zip(plain, its))


def _wrong_alone(kind: Kind, off: Answers, *few: Answers) -> str:
    """Why answers without the tier say nothing of it; empty if they do."""
    if kind.asked == STATES:
        alone = "" if kind.unrepeated else gpu_states.wrong_alone(off, few[0])
        return gpu_states.no_numbers(off, few[0]) or alone
    return _wrong_beside_lmcache(kind, off, *few) if kind.lmcache else ""


def _wrong_beside_lmcache(kind: Kind, off: Answers, alone: Answers) -> str:
    plain, its = (side[kind.asked]["tokens"] for side in (off, alone))
    equal = sum(a == b for a, b in zip(plain, its))
    if not alone[kind.asked]["brought"]:
        return "LMCache by itself, without the tier, brings nothing back"
    if equal == len(plain):
        return ""
    return (
        f"LMCache by itself, without the tier, gives {equal} of {len(plain)} answers as plain vLLM"
    )


def _of_its_own(kind: Kind, off: Answers, on: Answers, found: Answers) -> list[bool]:
    """What must hold of a kind besides; what was seen goes to ``found``."""
    if kind.kvcached:
        return _beside(off["shrunk"], on["shrunk"], found)
    if kind.lmcache:
        found["hits_of_both"] = on[kind.asked]["both"]
        found["tokens_brought"] = on[kind.asked]["brought"]
        return [found["hits_of_both"] > 0]
    if kind.connector:
        found["tokens_brought"] = on[kind.asked]["brought"]
        return [found["tokens_brought"][0] > 0]
    if kind.asked == FLIPPED:
        return _flipped(off[FLIPPED], on[FLIPPED], found)
    if kind.asked == SLEEPS:
        cached = on[SLEEPS]["cached"]
        found["kept"] = [name for name in (*KEPT, *LOST) if cached[name]]
        plain = {str(off[SLEEPS]["tokens"][name]) for name in LOST[:3]}
        return [found["kept"] == list(KEPT), len(plain) == 3]
    if kind.asked == COMMANDED:
        return _commanded(on[COMMANDED], found)
    if "guesses_alone" in on:
        accepted = [counted[2] for counted in on["guesses_alone"]["counted"]]
        found.update(drafts_accepted=accepted)
        return [min(accepted) > 0]
    return gpu_nodes.judge_answers(off, on, found) if kind.ray else []


def _flipped(off: Answers, on: Answers, found: Answers) -> list[bool]:
    """A block whose bit has changed is computed again: by default the first load shows it."""
    found["mismatches"] = mismatches = on["tier"]["mismatches"]
    return [not on["ended"], len(on["tokens"]) == len(off["tokens"]), mismatches > 0]


def _after_sleep(off: dict[str, Any], on: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Answers to compare: what the tier has found, with what plain vLLM answers when it has."""
    plain, tier = off[SLEEPS]["tokens"], on[SLEEPS]["tokens"]
    first = [(plain[f"{name}, twice"], tier[name]) for name in KEPT]
    first += [(plain[name], tier[name]) for name in LOST]
    again = [(plain[name], tier[name]) for name in tier if name.endswith(", twice")]
    return [pair for both in (*first, *again) for pair in zip(*both)]


def _after_commands(off: dict[str, Any], on: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Answers to compare: those to prompts of which all was found, or nothing, with plain vLLM's.

    What was found in part is cut elsewhere, so its answer says nothing.
    """
    plain, tier = off[COMMANDED], on[COMMANDED]
    like = [
        {plain["cached"][name][at]: plain["tokens"][name][at] for name in ("first", "first, twice")}
        for at in range(len(plain["tokens"]["first"]))
    ]
    return [
        (like[at][cached], tier["tokens"][name][at])
        for name, of_each in tier["cached"].items()
        for at, cached in enumerate(of_each)
        if cached in like[at]
    ]


def _commanded(on: dict[str, Any], found: Answers) -> list[bool]:
    """The tier has done as it was told; what was seen goes to ``found``."""
    cached, (_, before, smaller, larger, _) = on["cached"], on["capacities"]
    full = cached["first, twice"]
    found["had"] = [name for name in (*HAD, *NOT_HAD) if cached[name] == full]
    found.update(states=on["states"], capacities=on["capacities"])
    return [
        found["had"] == list(HAD),
        not any(tokens for name in NOT_HAD for tokens in cached[name]),
        on["states"] == ["paused", *["on"] * 4],
        0 < smaller < larger <= before,  # memory that was given back is taken piece by piece
    ]


def _beside(off: dict[str, Any], on: dict[str, Any], found: dict[str, Any]) -> list[bool]:
    """What must hold beside kvcached while its memory is limited; what was seen goes to ``found``.

    What was a hit on one side only is cut elsewhere, so its answer says nothing.
    """
    seen = zip(off["tokens"], on["tokens"], off["cached"], on["cached"])
    alike = [(a, b) for a, b, cached, also in seen if cached == also]
    hits = [cached for cached, also in zip(off["cached"], on["cached"]) if cached == also]
    stats = on["tier"]
    found.update(
        pool=on["pool"],
        limited=len(alike),
        limited_equal=sum(a == b for a, b in alike),
        limited_hits=sum(map(bool, hits)),
        pages=[on["pages_before"], on["pages"], on["total"], on["of"]],
        stored=stats["stored"],
        evicted=stats["evicted"],
    )
    return [
        found["pool"] == "ElasticBlockPool",
        found["limited_equal"] == len(alike),
        found["limited_hits"] > 0,
        on["pages"] < on["of"],
        stats["stored"] > 0,
        stats["evicted"] > 0,
    ]


# vLLM says so before the tier is attached: nothing of the tier has run then.
_NO_ROOM = re.compile(r"ValueError: (To serve at least one request with .*?) Try increasing")
_NO_SUCH = re.compile(
    r"Value error, (Model Runner V\d does not support: .+?|[^\n]+ requires Model Runner V2\.)"
    r"[^\n]* \[type=value_error"
)


def _ended(side: str, log: str) -> dict[str, Any]:
    """An engine that has not answered, the plain one ("off") or that with the tier ("on")."""
    for reason in (_NO_ROOM, _NO_SUCH):
        if why := reason.search(log):
            return {"outcome": "skipped", "why": f"vLLM does not start: {why.group(1)}"}
    return gpu_states.ended(side, log)
