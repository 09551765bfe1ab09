"""Random hits over vLLM's scheduler: `random_hits.py SEED SECONDS [RELEASE SOURCES]`.

One run is one seed: two engines alike are asked for the same, and both have room for everything on
the GPU. One has a tier, and now and then its GPU loses blocks that the tier has. As nothing takes
time, each request must hit as much there as in plain vLLM, which has lost nothing; of a prompt of
whole blocks the tier may know all but the last token.

SOURCES is the folder that has the release's `vllm/`. Prints one JSON object; status 1 if a run
failed.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(_TESTS.parent), str(_TESTS)]

# How requests load, and whether they come one by one.
WAYS = (("inline", False), ("inline", True), ("parked", True))
_BLOCKS, _SLOTS = 1200, 4000
_REQUESTS = 30


def describe(seed: int) -> dict[str, Any]:
    """What both engines of a seed are like, as arguments of `Mini`."""
    from integration.engine.mini import BLOCK
    from scheduler_half.device import Chunk, Replay, Ring
    from scheduler_half.drafts import Drafter
    from scheduler_half.sizes import Wide
    from scheduler_half.states import CHECKPOINTS, EVERY, STATE

    rng = random.Random(f"hits {seed}")
    windows = rng.choice([
        (None,), (None,), (40,), (None, 40), (None, 40, 40), (40, 40, None), (None, 24, 60),
        (None, Chunk(64)), (Chunk(48),), (None, STATE), (STATE, None, STATE), (STATE,),
        (None, CHECKPOINTS), (None, STATE, 40), (None, Wide(2 * BLOCK)), (Wide(3 * BLOCK), None),
        (None, Replay(40)), (None, Ring(8)),
    ])  # fmt: skip
    if every := seed % 20 == 7:  # not in the list, so that other seeds keep their models
        windows = (None, EVERY)
    limits: dict[str, Any] = {"max_num_batched_tokens": rng.choice([64, 256, 256])}
    if rng.random() < 0.3:
        limits["long_prefill_token_threshold"] = rng.choice([20, 48])
    windowed = any(kind in (STATE, CHECKPOINTS, EVERY, 24, 40, 60) for kind in windows)
    drafts = rng.random() < 0.5 and not every
    return {
        "windows": windows, "blocks": _BLOCKS, "num_slots": _SLOTS, "limits": limits,
        "policy": rng.choice(["fcfs", "fcfs", "priority"]),
        "retention": rng.choice([None, 0, 64]) if windowed else None,
        "drafter": Drafter(1 + seed % 3, seed, rng.random() < 0.8, False) if drafts else None,
    }  # fmt: skip


def run(seed: int, load_mode: str, one_by_one: bool) -> dict[str, int]:
    """One random run; returns what happened in it.

    Args:
        seed: of the run.
        load_mode: of the tier.
        one_by_one: no request comes before the one before has ended. Together, hits of states are
            not compared: which of them another request leaves depends on the step that each joins,
            and a tier that loads in the step takes a prompt under way for longer than vLLM's part.

    Raises:
        NotThere: plain vLLM has no such model, or fails with it.
        AssertionError: some request has hit more or less than without a tier, or a wrong token.
    """
    from integration.engine.mini import BLOCK, Mini
    from scheduler_half.scenarios import NotThere
    from scheduler_half.states import KINDS

    about = describe(seed)
    try:
        plain = Mini(tier=False, **about)
        _play(plain, seed, one_by_one)
    except Exception as reason:
        raise NotThere(f"{about['windows']}: {type(reason).__name__} {reason}"[:150]) from reason
    mini = Mini(load_mode=load_mode, store="eager", **describe(seed))
    _play(mini, seed, one_by_one)
    wrong, compared = {}, one_by_one or not {*KINDS} & {*about["windows"]}
    for name, hit in plain.hits.items():
        length, found = len(plain.prompts[name]), mini.hits[name]
        whole = length % BLOCK == 0 and found == length - 1 and hit + BLOCK == length
        if compared and found != hit and not whole:
            wrong[name] = (length, hit, found)
    assert not wrong, f"of (tokens, hit, hit with the tier): {wrong}; {about}"
    return {"loaded": mini.manager.stats.loaded, "hit": sum(plain.hits.values()), "runs": 1}


def _play(mini: Any, seed: int, one_by_one: bool) -> None:
    from scheduler_half.scenarios import nothing_held, prompt

    rng, losses = random.Random(f"asked {seed}"), random.Random(f"lost {seed}")
    known = [prompt(rng.randrange(1, 12), rng.randrange(10**6), rng.choice([0, 1, 7]))]
    for _ in range(_REQUESTS):
        beginning = rng.choice(known)
        beginning = beginning[: rng.randrange(1, len(beginning) + 1)]
        if rng.random() < 0.4:
            beginning = rng.choice(known)
        own = prompt(rng.choice([0, 0, 1, 4]), rng.randrange(10**6), rng.choice([0, 1, 9]))
        asked = (beginning + own)[:400] or [5]
        name = mini.add(asked, rng.choice([1, 2, 20, 40]), rng.randrange(3))
        steps = 10_000 if one_by_one else rng.choice([0, 1, 2, 6, 10_000])
        while steps and (mini.queue or mini.scheduler.has_requests()):
            mini.step()
            steps -= 1
            _lose(mini, losses)
        _lose(mini, losses)
        known.append(asked)
        if rng.random() < 0.3 and name not in mini.scheduler.requests:
            known.append(asked + mini.answers[name])
    mini.run()
    mini.check()
    if mini.tier is not None:
        nothing_held(mini)


def _lose(mini: Any, losses: random.Random) -> None:
    """The GPU loses some blocks that nobody uses, and that the tier has."""
    if mini.tier is None or losses.random() < 0.5:
        return
    share = losses.choice([0.1, 0.5, 1.0])
    for block in mini.pool.blocks:
        key = block.block_hash
        if key is None or block.ref_cnt or losses.random() > share:
            continue
        if mini.manager.lookup(key):
            mini.pool._maybe_evict_cached_block(block)
            mini.tier._lookups.blocks_reused([block.block_id])


def main(seed: str, seconds: str, release: str = "", folder: str = "") -> int:
    """Run seed after seed for so long, and print what came out."""
    if release:
        from scheduler_half import half

        half.use_release(release, Path(folder).resolve())
    from scheduler_half.scenarios import NotThere

    end, at = 0.0, int(seed)
    failed, absent, seen = dict[str, str](), Counter[str](), Counter[str]()
    while not end or time.monotonic() < end:
        for load_mode, one_by_one in WAYS:
            try:
                seen.update(run(at, load_mode, one_by_one))
            except NotThere as reason:
                absent[str(reason)] += 1
            except Exception:  # noqa: BLE001 - it is what came out
                why = "".join(traceback.format_exc().splitlines(True)[-3:])
                failed[f"{at}, {load_mode}, {'one by one' if one_by_one else 'together'}"] = why
        at += 1
        end = end or time.monotonic() + float(seconds)
    told = {"release": release, "seen": seen, "absent": absent, "failed": failed}
    print(json.dumps(told, indent=1))
    sys.stdout.flush()
    return int(bool(failed))


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))
