"""Rows of docs/features.md of what the tier refuses, by what it is refused beside.

Each sentence with which `integration/engine/eligibility.py` and `eligible_states.py` refuse is said
by a test of a row: of these, or of those that `features_rows` has beside what is taken.
"""

from __future__ import annotations

from scripts.matrix.features_row import Row

_FILE = "tests/integration/engine/test_eligibility.py::test_"
_AT_START = f"{_FILE}what_the_tier_cannot_vouch_for_is_refused"
_STATES = f"{_FILE}what_was_not_played_with_states_on_a_gpu_is_refused_and_can_be_tried"
_KVCACHED = f"{_FILE}beside_kvcached_what_was_not_run_is_refused"
_SCHEDULERS = (
    "tests/integration/engine/ranks/test_checks.py::"
    "test_a_scheduler_that_has_one_of_several_ranks_is_refused"
)
_TESTS = (_AT_START, _STATES, _KVCACHED, _SCHEDULERS)
_CHECK = "the check at start"


def refused(name: str, *cases: str, release: str = "") -> Row:
    """Refused by the check at start, in these cases."""
    return Row(name, _CHECK, tuple(f"{_AT_START}[{case}]" for case in cases), release=release)


def _of_states(name: str, *cases: str) -> Row:
    """The same of states on a GPU with a release with which they are taken there."""
    tests = tuple(f"{_STATES}[{case}]" for case in cases)
    return Row(name, _CHECK, tests, release="0.26.0")


def is_refused(row: Row) -> bool:
    """Whether the row is of what the tier refuses."""
    return any(test.startswith(_TESTS) for test in row.tests)


STATES = (
    _of_states("states on several pipeline stages that were not shown on a GPU", "stages"),
    _of_states("states beside a KV connector on a GPU", "a connector"),
    _of_states(
        "delta attention: gated delta nets beside MLA (Kimi-Linear), and of models without it",
        "delta attention, beside MLA",
        "delta attention, by model",
    ),
    refused(
        "states that a step leaves within it, other than Mamba 2, on a GPU",
        "states within a step, on a GPU",
        release="0.33.0",
    ),
    refused(
        "states with speculative decoding and runner V2 on the CPU",
        "states of drafts, runner V2",
        release="0.33.0",
    ),
    refused(
        "states with speculative decoding on several pipeline stages, at every block, or with keys "
        "of more tokens",
        "states of drafts in stages",
        "states at every block beside drafts",
        "states within a step and keys with more",
    ),
    refused(
        "states in one group with attention, or outside of the prefix cache",
        "states beside attention in one group",
        "states outside of the prefix cache",
    ),
)
SHAPES = (
    refused(
        "hits that end within a block, beside what they were not run with",
        "hits within a block, drafts",
        "hits within a block, another kind on a GPU",
        "hits within a block, checkpoints",
        "hits within a block, blocks of two sizes",
        release="0.32.0",
    ),
    refused(
        "groups of a kind that was not read",
        "unknown spec",
        "unknown outside of the prefix cache",
        "replay",
    ),
    refused("diffusion models", "diffusion"),
    refused("a lookup of prefixes that others have put in place of vLLM's", "a lookup of others"),
)
PARALLEL = (
    refused(
        "decode context parallelism with several groups of full attention",
        "decode context parallel, full attention twice",
    ),
    refused("decode context parallelism with states", "decode context parallel, states"),
    refused(
        "prefill and decode context parallelism together",
        "prefill and decode context parallel",
        release="0.32.0",
    ),
    refused("fault tolerance (--enable-fault-tolerance)", "an engine that goes on"),
    Row(
        "several ranks with the executor external_launcher",
        "the check of ranks at start",
        (_SCHEDULERS,),
    ),
    refused(
        "pipeline stages and asynchronous scheduling before 0.10.2",
        "stages before 0.10.2",
        "asynchronous scheduling before 0.10.2",
        release="0.10.1.1",
    ),
)
NEIGHBOURS = (
    refused(
        "kvcached before vLLM 0.26, with several workers, or with stores that wait",
        "kvcached, keys of its own",
        "kvcached, several workers",
        "kvcached, stores that wait",
    ),
    Row(
        "kvcached with several groups, drafts, a KV connector or sleep",
        _CHECK,
        (_KVCACHED,),
        release="0.26.0",
    ),
)
