"""Faults beside a KV connector: blocks that it failed to fill, and what was computed on them."""

from __future__ import annotations

from scripts.matrix.mutants_list import Mutant

_FILES = "integration/engine/"
_INVALID = "integration/engine/blocks/test_invalid_blocks.py::"
_ADMISSION = "integration/engine/requests/test_admission.py::"

CONNECTORS = (
    Mutant(
        "what a connector failed to fill stays in vLLM's prefix cache",
        _FILES + "blocks/invalid_blocks.py",
        "self._view.adapter.uncache([block])",
        "pass",
        (_INVALID + "test_nobody_hits_what_was_computed_upon_a_failed_load",),
    ),
    Mutant(
        "a request that waits keeps blocks that a connector failed to fill",
        _FILES + "requests/loads.py",
        "if block.block_id in self._untrusted",
        "if False",
        (_INVALID + "test_a_request_that_waits_for_a_load_holds_none_of_them",),
    ),
    Mutant(
        "of requests that do not run, what they computed upon an unfilled block is kept",
        _FILES + "blocks/invalid_blocks.py",
        "names = self._view.scheduler.requests",
        "names = [one.request_id for one in self._view.scheduler.running]",
        (_INVALID + "test_a_session_that_waits_for_input_has_computed_upon_it_as_well",),
    ),
    Mutant(
        "what was computed upon an unfilled block is kept where its request was preempted",
        _FILES + "blocks/invalid_blocks.py",
        "if not has.issuperset(",
        "if name not in tables and not has.issuperset(",
        (_INVALID + "test_a_request_that_is_gone_has_computed_upon_it_as_well",),
    ),
    Mutant(
        "the key of a block that a connector did not fill is kept",
        _FILES + "blocks/invalid_blocks.py",
        "self._manager.discard(key)",
        "pass",
        (_INVALID + "test_all_that_was_computed_upon_a_failed_load_is_discarded",),
    ),
    Mutant(
        "a request whose blocks a connector has brought takes no room of those behind it",
        _FILES + "requests/admission.py",
        "self.needed = self._view.groups.new_blocks(request, todo)",
        "self.needed = 0",
        (
            _ADMISSION
            + "test_one_behind_does_not_take_the_room_of_a_request_whose_blocks_have_arrived",
        ),
    ),
)
