"""KV cache groups of layers that keep a state, on the device of `device`.

A block has one value: that of the last token that it has seen. As vLLM's runner in align mode, a
step copies it to the block that the step ends in, and advances it there. With checkpoints, a
prompt's last step leaves the state at the end of the block before in that block, where vLLM's own
rule says so. With drafts, the state behind each token of a step is in a block of its own, one
behind another in the request's table; once it is known which tokens stand, the state at an end of a
block that they have reached is copied to that block.

In mode `all` nothing is copied: a step leaves the state at the end of each block in that block, and
goes on from the one that holds the token before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# In the place of a group's window: layers that keep a state; such that can also leave the one of an
# earlier token behind, within a step; and such that leave one at the end of every block (mode all).
STATE, CHECKPOINTS, EVERY = "state", "state with checkpoints", "state at every block"
ALIGNED = (STATE, CHECKPOINTS)
KINDS = (*ALIGNED, EVERY)


class StateWindow:
    """Of a request: where in its tables the last step had its states, and how many of them stand.

    Attributes:
        column: of the first of them; None before its first step.
        accepted: the last that stands, counted from 1.
    """

    def __init__(self) -> None:
        self.column: int | None = None
        self.accepted = 1


class StateGroups:
    """What a step does with states.

    Args:
        kv: the values of each GPU block.
        size: tokens of a block.
        windows: of each KV cache group.
        drops: whether a drafting model makes a hit's last block one to compute again.
        unit: tokens after which a hit may end.
        ahead: tokens behind them that a key has as well.

    Attributes:
        moved: steps in which a state has come to another block.
        checkpoints: states left behind within a step.
        settled: states copied to their block after a step with drafts.
    """

    def __init__(
        self, kv: list[list[int]], size: int, windows: Any, drops: bool, unit: int, ahead: int
    ) -> None:
        self._kv, self._size, self._drops, self._unit = kv, size, drops, unit
        self._ahead = ahead
        self._groups = {at: kind for at, kind in enumerate(windows) if kind in ALIGNED}
        self._every = [at for at, kind in enumerate(windows) if kind == EVERY]
        self.moved = self.checkpoints = self.settled = 0

    def of(self, sequence: Any, group: int, table: list[int], end: int) -> int:
        """The state that the next token of a request goes on from, behind ``end`` ones."""
        if group in self._every:
            return self._kv[table[(end - 1) // self._size]][0]
        window = sequence.window
        return self._kv[table[(window.column or 0) + window.accepted - 1]][0]

    def move(self, sequence: Any, start: int, end: int) -> None:
        """Before a step: its states begin in the block that it ends in, and those behind."""
        window, column = sequence.window, (end - 1) // self._size
        before = (start - 1) // self._size if window.column is None else window.column
        if before not in (-1, column):
            self._copy(sequence, before + window.accepted - 1, column)
            self.moved += 1
            window.accepted = 1
        window.column = column

    def advance(
        self, sequence: Any, start: int, values: list[int], drafts: int, added: Callable[[int], int]
    ) -> None:
        """The step: a state for each token that may turn out to be the last that stands.

        Args:
            sequence: of the request.
            start: tokens before the step.
            values: of all tokens at its end.
            drafts: tokens of it that were drafted.
            added: to the values of a group.
        """
        self._fill_every(sequence, start, values, added)
        first = start if drafts else len(values) - 1
        for group, kind in self._groups.items():
            table = sequence.tables[group]
            if kind == CHECKPOINTS and not drafts:
                self._leave_checkpoint(table, start, values, added(group))
            for at, value in enumerate(values[first:], sequence.window.column):
                assert table[at], "a step keeps its state in the null block"
                self._fill(table[at], value + added(group))

    def settle(self, sequence: Any, first: int, accepted: int) -> None:
        """After a step: the state at an end of a block goes to that block.

        Args:
            sequence: of the request.
            first: tokens behind which the first state of the step's window is.
            accepted: states of it that stand.
        """
        window, last = sequence.window, first + accepted - 1
        window.accepted = accepted
        end = last // self._size * self._size
        if end < first:
            return
        source, target = window.column + end - first, end // self._size - 1
        if source != target:
            self._copy(sequence, source, target)
            self.settled += 1
        if target == window.column:
            window.accepted = 1

    def _fill_every(
        self, sequence: Any, start: int, values: list[int], added: Callable[[int], int]
    ) -> None:
        """The state at the end of each block that the step computes of, or of its last token."""
        size, end = self._size, len(values)
        for group in self._every:
            table = sequence.tables[group]
            for column in range(start // size, -(-end // size)):
                assert table[column], "a step keeps its state in the null block"
                value = values[min(end, (column + 1) * size) - 1]
                self._fill(table[column], value + added(group))

    def _fill(self, block_id: int, value: int) -> None:
        """A block of a group whose blocks have more tokens is as long."""
        self._kv[block_id] = [value] * len(self._kv[block_id])

    def _copy(self, sequence: Any, source: int, target: int) -> None:
        for group in self._groups:
            table = sequence.tables[group]
            if table[target]:  # the null block takes what nobody wants
                self._kv[table[target]] = list(self._kv[table[source]])

    def _leave_checkpoint(
        self, table: list[int], start: int, values: list[int], added: int
    ) -> None:
        """The state at the last end of a block within the step, where vLLM's runner leaves it."""
        from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints

        end, size, unit = len(values), self._size, self._unit
        asked = ([end], [end - start], unit, size, 1, self._drops, unit, self._ahead)
        # One less in 0.32, and two in 0.31.
        taken = compute_mamba_prefill_checkpoints.__code__.co_argcount
        (offset,), (column,) = compute_mamba_prefill_checkpoints(*asked[:taken])
        if offset and table[column]:
            self.checkpoints += 1
            self._fill(table[column], values[start + offset - 1] + added)
