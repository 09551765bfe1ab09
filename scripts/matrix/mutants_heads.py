"""Faults of what the GPU keeps of prefixes."""

from __future__ import annotations

from scripts.matrix.mutants_list import Mutant

_FILES = "integration/engine/"
_HEADS = "integration/engine/blocks/test_gpu_heads.py::"

HEADS = (
    Mutant(
        "a block that a request uses is handed out",
        _FILES + "blocks/gpu_heads.py",
        " and not b.ref_cnt",
        "",
        (_HEADS + "test_a_tail_that_another_request_uses_stays",),
    ),
    Mutant(
        "a tail that the tier lacks is handed out first",
        _FILES + "blocks/gpu_heads.py",
        " if has(key) is not None)",
        ")",
        (_HEADS + "test_nothing_is_handed_out_early_that_is_needed",),
    ),
    Mutant(
        "a tail is handed out before blocks that hold nothing",
        _FILES + "blocks/recency.py",
        "looked, whole = True, heads.blocks_are_left(len(request_ids))",
        "pass",
        (_HEADS + "test_nothing_is_handed_out_early_that_is_needed",),
    ),
    Mutant(
        "blocks that are handed out first are lost but for one",
        _FILES + "adapters/vllm_pool.py",
        "taken.append(block)",
        "taken[:] = [block]",
        (_HEADS + "test_a_tail_is_handed_out_first_its_end_before_all",),
    ),
    Mutant(
        "what ends with a tail in another group stays",
        _FILES + "blocks/gpu_heads.py",
        "if rests.get(key, key) in given",
        "if key in given",
        (_HEADS + "test_windows_are_handed_out_with_the_tail_that_they_end_with",),
    ),
    Mutant(
        "a prefix is told with its end before what is loaded of its middle",
        _FILES + "blocks/recency.py",
        "found.merged(keys, found.keys)",
        "[*keys, *found.keys]",
        ("integration/engine/blocks/test_recency.py",),
    ),
    Mutant(
        "blocks that ended requests have left are taken for those of an empty GPU",
        _FILES + "blocks/gpu_heads.py",
        " + ended * view.decode_blocks",
        "",
        (_HEADS + "test_tails_of_many_requests_that_end_in_a_step_are_handed_out",),
    ),
    Mutant(
        "what all prefixes begin with counts as often as it is sampled",
        "tier/prefix_share.py",
        "soon + self._expected - self._used",
        "soon",
        ("tier/test_prefix_share.py",),
    ),
    Mutant(
        "heads have more room than nobody uses",
        "tier/prefix_share.py",
        "self._room = min(self._room, self._free)",
        "pass",
        ("tier/test_prefix_share.py",),
    ),
    Mutant(
        "old uses of prefixes fade once for each request",
        "tier/prefix_share.py",
        " ** bins",
        "",
        ("tier/test_prefix_share.py",),
    ),
    Mutant(
        "a reset that vLLM refuses forgets what heads there are",
        _FILES + "tier.py",
        "self._recency.used.clear()\n        self._front.look_again()\n        self.cached.clear()",
        "self._recency.clear()\n        self._front.look_again()\n        self.cached.clear()",
        (_HEADS + "test_a_tail_is_handed_out_first_its_end_before_all",),
    ),
)
