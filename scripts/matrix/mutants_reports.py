"""Faults in what is told to others: KV events, figures, and what is put back at the end."""

from __future__ import annotations

from scripts.matrix.mutants_list import Mutant

_FILES = "integration/engine/"
_EVENTS = "integration/engine/adapters/test_vllm_events.py::"

REPORTS = (
    Mutant(
        "a block of the tier is told of before its parent",
        _FILES + "adapters/vllm_events.py",
        "if before is None or before in self._in_tier or self._on_gpu(before):",
        "if True:",
        (_EVENTS + "test_a_block_is_told_of_behind_its_parent",),
    ),
    Mutant(
        "a block that waited to be told of is told of though it has left",
        _FILES + "adapters/vllm_events.py",
        "self._give_up(key)",
        "pass",
        (_EVENTS + "test_a_block_that_waits_and_leaves_is_never_told_of",),
    ),
    Mutant(
        "a failure as the tier is closed leaves vLLM's objects changed",
        _FILES + "breaker.py",
        "            finally:\n                self._view.restore()",
        "            finally:\n                pass\n            self._view.restore()",
        (_FILES + "test_breaker.py::test_closing_puts_everything_back_whatever_fails_in_it",),
    ),
    Mutant(
        "a command whose figures cannot be taken detaches the tier",
        _FILES + "reports/metrics.py",
        "        with _unseen():\n            before, self._about",
        "        if True:\n            before, self._about",
        (
            _FILES + "reports/test_metrics.py"
            "::test_a_command_is_carried_out_though_its_figures_cannot_be_taken",
        ),
    ),
)
