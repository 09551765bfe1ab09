"""The faults of `scripts/matrix mutants` in what is loaded, compared and computed instead."""

from __future__ import annotations

from scripts.matrix.mutants_list import Mutant

_REQUESTS = "integration/engine/requests/"
_CHOICE = _REQUESTS + "test_inline_choice.py"
_PACE = _REQUESTS + "test_pace.py"

LOADS = (
    Mutant(
        "a hit is computed though that takes as long as its load",
        _REQUESTS + "pace.py",
        "LONGER_LOAD_TIMES * computing_ms",
        "computing_ms / 2",
        (_PACE, _CHOICE),
    ),
    Mutant(
        "a step that waits for loads says what a token takes to compute",
        _REQUESTS + "pace.py",
        " and not waits:",
        ":",
        (_PACE,),
    ),
    Mutant(
        "a step that is lost is timed with the next one",
        _REQUESTS + "pace.py",
        "while (first := self._prefills.popleft())[0] is not output:",
        "while not (first := self._prefills.popleft()):",
        (_PACE,),
    ),
    Mutant(
        "a bus that is fast again is never noticed",
        _REQUESTS + "inline.py",
        "if not self._computed % TRIED_LOADS:",
        "if False:",
        (_CHOICE,),
    ),
    Mutant(
        "no load is compared where none is parked for other reasons",
        _REQUESTS + "inline.py",
        'return load_mode != "inline"',
        'return load_mode == "parked"',
        (_REQUESTS + "test_loads_compared.py",),
    ),
    Mutant(
        "a command is carried out whose client has gone",
        "integration/engine/control.py",
        "if not asked.command.wanted():",
        "if False:",
        ("integration/engine/test_control.py",),
    ),
    Mutant(
        "a slot under way is evicted in a tier that has become lazy",
        "tier/exclusive.py",
        "self._apart = set(under_way)",
        "self._apart = set()",
        ("tier/test_exclusive.py", "tier/test_manager.py"),
    ),
    Mutant(
        "what has left a batch leaves it once more as one of the oldest",
        "tier/policies/batches.py",
        "if batch_of[slots[at]] == number)",
        "if at >= 0)",
        ("tier/policies/test_batches.py",),
    ),
    Mutant(
        "an eviction of s3fifo lets any number of blocks go round",
        "tier/policies/s3fifo.py",
        "ROUND_TIMES * count",
        "10**9 * count",
        ("tier/test_policy.py",),
    ),
)
