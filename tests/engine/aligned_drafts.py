"""States beside drafted tokens on the CPU: kernels that the build lacks, in PyTorch.

With drafts a step leaves a state behind each of its tokens, and it is known only then which of them
stand. From 0.29 on vLLM has a Triton kernel that copies states before the forward pass, and one
that leaves the state at the end of a block in that block after it. Triton's interpreter, on which
runner V2 plays, would take minutes for them. Plain vLLM plays with the same.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Put them in the places of vLLM's own, in this process."""
    from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext as Context

    as_made = Context.initialize_from_forward_context

    def initialize(
        self: Any, config: Any, layers: Any, kinds: Any, tables: Any, *of_the_batch: Any
    ) -> None:
        if not self.is_initialized:
            as_made(self, config, layers, kinds, tables, *of_the_batch)
            # Rows of all requests; what is given has those of this step.
            self.tables = [table if table._base is None else table._base for table in tables]
            self.states = list(_states(self.mamba_group_ids, config, layers))

    Context.initialize_from_forward_context = initialize
    Context.run_fused_precopy = _before
    Context.run_fused_postprocess = _after
    Context.run_fused_postprocess_align = _after_by_slots


def _states(groups: list[int], config: Any, layers: Any) -> Any:
    """Of each layer: which of the tables is its, and its tensors; the first is of a convolution."""
    for at, group in enumerate(groups):
        for name in config.kv_cache_groups[group].layer_names:
            yield at, *layers[name].kv_cache


def _before(
    self: Any, num_reqs: int, state_idx_gpu: Any, src_col_gpu: Any, token_bias_gpu: Any,
    idx_mapping: Any,
) -> None:  # fmt: skip
    """The last state that stands begins the window of states of this step."""
    for row in _rows(num_reqs, idx_mapping):
        source, target = int(src_col_gpu[row]), int(state_idx_gpu[row])
        if source not in (-1, target):
            _copy(self, row, source, target, int(token_bias_gpu[row]))


def _rows(num_reqs: int, slots: Any) -> list[int]:
    """Where the step's requests are: in its order with runner V1, each in its slot with V2."""
    return (
        list(range(num_reqs)) if slots is None else [s for s in slots[:num_reqs].tolist() if s >= 0]
    )


def _after(
    self: Any, num_reqs: int, num_accepted_tokens_gpu: Any, mamba_state_idx_gpu: Any,
    num_scheduled_tokens_gpu: Any, num_computed_tokens_gpu: Any, num_draft_tokens_gpu: Any,
) -> None:  # fmt: skip
    """The state at an end of a block that accepted tokens have reached goes to that block."""
    self.num_accepted_tokens_out[:num_reqs] = num_accepted_tokens_gpu[:num_reqs]
    columns = (
        num_accepted_tokens_gpu, mamba_state_idx_gpu, num_scheduled_tokens_gpu,
        num_computed_tokens_gpu, num_draft_tokens_gpu,
    )  # fmt: skip
    rows = zip(*(column[:num_reqs].tolist() for column in columns))
    for row, (accepted, source, scheduled, computed, drafted) in enumerate(rows):
        first = computed + scheduled - drafted
        _leave(self, row, source, first, first + accepted - 1, self.num_accepted_tokens_out)


def _after_by_slots(
    self: Any, num_reqs: int, num_accepted_tokens_gpu: Any, state_idx_gpu: Any,
    new_num_computed_tokens_gpu: Any, idx_mapping: Any,
) -> None:  # fmt: skip
    """The same with runner V2, which knows what is computed then, and writes in place."""
    for row in _rows(num_reqs, idx_mapping):
        computed, source = int(new_num_computed_tokens_gpu[row]), int(state_idx_gpu[row])
        first = computed - int(num_accepted_tokens_gpu[row]) + 1
        _leave(self, row, source, first, computed, num_accepted_tokens_gpu)


def _leave(self: Any, row: int, source: int, first: int, computed: int, accepted: Any) -> None:
    """Leave the state at the last end of a block up to ``computed`` in that block.

    ``first``: tokens behind which the window of states begins; nothing is left before it.
    """
    end = computed // self.block_size * self.block_size
    target = end // self.block_size - 1
    if end < first:
        return
    if source == target:
        accepted[row] = 1
    if (source, end) != (target, first):
        _copy(self, row, source, target, end - first)


def _copy(self: Any, row: int, source: int, target: int, passed: int) -> None:
    """A convolution's inputs move up by the tokens passed; others have a block for each token."""
    for at, inputs, *others in self.states:
        table = self.tables[at][row].tolist()
        kept = inputs[table[source], passed:].clone()
        inputs[table[target], : len(kept)] = kept
        for states in others:
            states[table[target]] = states[table[source + passed]]
