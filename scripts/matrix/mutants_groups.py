"""Faults of KV cache groups, and of adapters whose weights change under their name."""

from __future__ import annotations

from scripts.matrix.mutants_list import Mutant

_FILES = "integration/engine/"
_EXPERTS = "integration/engine/adapters/test_vllm_experts.py::"
_ADMISSION = "integration/engine/requests/test_admission.py::"
_BESIDE = "integration/engine/test_breaker_beside.py::"
_LORA = "integration/engine/adapters/test_vllm_lora.py"
_RANDOM_PARTS = "integration/engine/test_random_runs.py::test_random_runs_of_hits_within_a_block"
_SILENT = "integration/engine/ranks/test_workers_silent.py::"

GROUPS = (
    Mutant(
        "vLLM's count of a whole prompt does not matter",
        _FILES + "adapters/vllm_groups.py",
        "counted = min(whole, cap) - unseen if self._reserves_all else 0",
        "counted = 0",
        (_FILES + "adapters/test_vllm_groups.py",),
    ),
    Mutant(
        "states at every block are counted as two of a request",
        _FILES + "adapters/vllm_groups.py",
        'return any(getattr(one, "mamba_cache_mode", None) == "all" for one in members(spec))',
        "return False",
        (_FILES + "adapters/test_vllm_groups.py",),
    ),
    Mutant(
        "behind states at every block a request sees no other token",
        _FILES + "adapters/vllm_groups.py",
        "return 2, 0",
        "return 1, 0",
        (_FILES + "adapters/test_vllm_groups.py",),
    ),
    Mutant(
        "an engine that stood still holds blocks for all that wait",
        _FILES + "requests/admission.py",
        "if self._stood_still:",
        "if False:",
        (
            _ADMISSION
            + "test_what_is_held_for_those_that_wait_does_not_keep_the_first_one_out_for_ever",
        ),
    ),
    Mutant(
        "windows in one group free blocks",
        _FILES + "adapters/vllm_groups.py",
        'if type(manager).__name__ == "FullAttentionManager":',
        "if False:",
        (_FILES + "adapters/test_vllm_groups.py",),
    ),
    Mutant(
        "what is loaded for an adapter that is loaded again meanwhile is published",
        _FILES + "requests/loads.py",
        " or self._view.is_stale(load.owner)",
        "",
        (_LORA,),
    ),
    Mutant(
        "an adapter that was unloaded counts as the one before",
        _FILES + "adapters/vllm_lora.py",
        "bool(files and files == self._files.get(before) and not in_place)",
        "not in_place",
        (_LORA,),
    ),
    Mutant(
        "an adapter that is loaded in place counts as the one before",
        _FILES + "adapters/vllm_lora.py",
        'getattr(lora, "load_inplace", False)',
        "False",
        (_LORA,),
    ),
    Mutant(
        "an adapter's name that is forgotten is trusted",
        _FILES + "adapters/vllm_lora.py",
        "self._forgotten.add(forgotten)",
        "pass",
        (_LORA,),
    ),
    Mutant(
        "a block counts as whole under the key of a part",
        _FILES + "adapters/vllm_groups.py",
        "if key is not None and block.block_hash_num_tokens % sizes[split(key)[1]]:",
        "if False:",
        (_RANDOM_PARTS,),
    ),
    Mutant(
        "the copy of a block that a hit ends in takes no room",
        _FILES + "adapters/vllm_groups.py",
        "if self.parts and hit_tokens:",
        "if False:",
        (_FILES + "adapters/test_vllm_groups.py",),
    ),
    Mutant(
        "a hit needs no records of experts",
        _FILES + "adapters/vllm_lookup.py",
        "max_cache_hit_length = min(max_cache_hit_length, self._most)",
        "pass",
        (_EXPERTS + "test_a_hit_ends_where_there_are_no_records",),
    ),
    Mutant(
        "records of experts are not kept during a load",
        _FILES + "requests/loads.py",
        "self._view.prefix.experts.loading(request, found.tokens)",
        "pass",
        (_EXPERTS + "test_a_hit_ends_where_there_are_no_records",),
    ),
    Mutant(
        "what an aborted request loads is hit without records of experts",
        _FILES + "requests/loads.py",
        "load.stale |= load.owner.request_id == request_id",
        "pass",
        (_EXPERTS + "test_nobody_hits_what_an_aborted_request_loads",),
    ),
    Mutant(
        "what fails in a search is vLLM's to raise",
        _FILES + "adapters/vllm_lookup.py",
        'self.failed("find_longest_cache_hit", error)',
        "raise",
        (_BESIDE + "test_vllm_searches_by_itself_where_it_cannot_be_given_what_was_found",),
    ),
    Mutant(
        "what fails when vLLM falls asleep is its client's",
        _FILES + "breaker.py",
        'self._call("sleep_begins", self.tier.weights.sleep_begins, level)',
        "self.tier.weights.sleep_begins(level)",
        (_BESIDE + "test_vllm_falls_asleep_whatever_the_tier_makes_of_it",),
    ),
    Mutant(
        "the end of an engine waits for processes that may have ended",
        "integration/engine/ranks/workers.py",
        'if hasattr(self._executor, "driver_worker") and not self.silent:',
        "if not self.silent:",
        (_SILENT + "test_processes_of_their_own_are_not_asked_to_close",),
    ),
    Mutant(
        "the end of an engine asks a rank that was late",
        "integration/engine/ranks/workers.py",
        'if hasattr(self._executor, "driver_worker") and not self.silent:',
        'if hasattr(self._executor, "driver_worker"):',
        (_SILENT + "test_the_end_of_an_engine_asks_no_rank_that_was_late",),
    ),
    Mutant(
        "a stream waits for the event of a copy that has ended meanwhile",
        "transfer/queue.py",
        "if event is not None and stream is not None:",
        "if stream is not None:",
        (
            "transfer/test_queue.py::"
            "test_a_copy_that_another_thread_finds_done_meanwhile_is_not_waited_for",
        ),
    ),
    Mutant(
        "a rank that was closed within a step is told that vLLM has raised",
        "integration/worker/tier.py",
        "if not self.order.closed:\n            self._engine.step_raised()",
        "if True:\n            self._engine.step_raised()",
        (
            "integration/worker/test_step_order.py::"
            "test_what_vllm_raises_is_raised_if_the_rank_was_closed_within_the_step",
        ),
    ),
    Mutant(
        "references that were given back one by one still count as held",
        "integration/engine/adapters/vllm_pool.py",
        "self._num_held -= len(blocks)",
        "pass",
        (
            "integration/engine/adapters/test_vllm_pool.py::"
            "test_a_common_prefix_is_taken_back_for_as_long_as_anything_is_held",
        ),
    ),
    Mutant(
        "blocks that a request hits go to one before it",
        "integration/engine/requests/loads.py",
        "if not (found.search or self.is_next(found.gpu_blocks, taken)):",
        "if not found.search:",
        (
            "integration/engine/requests/test_admission.py::"
            "test_what_is_hit_on_the_gpu_is_not_given_to_those_before_it",
        ),
    ),
)
