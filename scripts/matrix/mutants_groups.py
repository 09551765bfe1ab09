"""Faults of KV cache groups, and of adapters whose weights change under their name."""

from __future__ import annotations

from scripts.matrix.mutants_list import Mutant

_FILES = "integration/engine/"
_EXPERTS = "integration/engine/adapters/test_vllm_experts.py::"
_BESIDE = "integration/engine/test_breaker_beside.py::"
_LORA = "integration/engine/adapters/test_vllm_lora.py"
_RANDOM_PARTS = "integration/engine/test_random_runs.py::test_random_runs_of_hits_within_a_block"

GROUPS = (
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
        "if self.parts and key is not None and block.block_hash_num_tokens % self.block_sizes[0]:",
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
)
