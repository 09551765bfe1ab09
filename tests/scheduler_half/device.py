"""A model that is arithmetic, and the device that it runs on: KV blocks, CPU slots and copies.

The KV value of a token is made of the token and of the value before it; the next token is made
of the last value. A step reads every value that attention would read, in the blocks that the
scheduler's output names; one that is wrong makes the values and the token of that step wrong.

A group of layers that keep a state is in `states`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import Any

from scheduler_half.cascade import common_blocks, read_tables
from scheduler_half.drafts import Drafter, scheduled_drafts, tell
from scheduler_half.sizes import BLOCK, Replicated, Wide, group_size, hash_size
from scheduler_half.states import KINDS, StateGroups, StateWindow
from scheduler_half.tables import running_of, tables_of

from kvoffload_patch.links import CPU, GPU, LOAD, RAISED, STORE, Failure, Link
from kvoffload_patch.plan import Transfer, TransferPlan, TransferResult

VOCABULARY = 30_000
_MODULUS = (1 << 61) - 1
_WRONG = 1 << 40
_GROUP = 1 << 50  # between the values of one token in two KV cache groups


class Chunk(int):
    """In the place of a group's window: attention within chunks of so many tokens."""


class Replay(int):
    """A window that vLLM keeps out of its prefix cache, and fills again behind a hit."""


class Ring(int):
    """In the place of a group's window: a ring of so many tokens; it reads those of an open pair.

    So it is kept out of the prefix cache, too: pairs are closed where blocks end.
    """


Fails = Callable[[str, int], bool]


def value_after(value: int, token: int) -> int:
    """The KV value of a token behind a value."""
    return (value * 1_000_003 + token + 1) % _MODULUS


def answer(prompt: list[int], count: int) -> list[int]:
    """What the model answers without any cache."""
    value, tokens = 0, []
    for token in prompt:
        value = value_after(value, token)
    for _ in range(count):
        tokens.append(value % VOCABULARY)
        value = value_after(value, tokens[-1])
    return tokens


class LoadFailed(Exception):
    """A load that a step reads has failed, so the engine ends, as a rank would have it."""


class CopyQueue:
    """Copies of one link, in order, each as late as it is waited for.

    Args:
        patience: polls after which a copy is carried out though nothing waits for it.
    """

    def __init__(self, patience: int) -> None:
        self.done = 0
        self._patience = patience
        self._queued: deque[list[Any]] = deque()  # [ticket, copy, polls seen]

    def submit(self, ticket: int, copy: Callable[[], None]) -> None:
        """``copy`` is under way."""
        self._queued.append([ticket, copy, 0])

    def wait(self, ticket: int) -> None:
        """Return when every copy up to this ticket is done."""
        while self._queued and self._queued[0][0] <= ticket:
            self._carry_out()

    def drain(self) -> None:
        """Return when every copy is done."""
        while self._queued:
            self._carry_out()

    def poll(self) -> int:
        """The last ticket done."""
        for entry in self._queued:
            entry[2] += 1
        while self._queued and self._queued[0][2] > self._patience:
            self._carry_out()
        return self.done

    def _carry_out(self) -> None:
        ticket, copy, _ = self._queued.popleft()
        copy()
        self.done = ticket


class _Sequence:
    """One request as the model runner knows it."""

    def __init__(self, tokens: list[int], tables: list[list[int]]) -> None:
        self.tokens = tokens
        self.tables = tables
        self.values: list[int] = []  # right values of the first tokens
        self.replay = range(0)  # tokens of its hit that are computed again
        self.guessed: list[int] = []  # the tokens behind, by a drafter
        self.window = StateWindow()

    def right(self, end: int) -> list[int]:
        """The right values of all tokens up to ``end`` and perhaps more."""
        values = self.values
        for at in range(len(values), end):
            values.append(value_after(values[-1] if values else 0, self.tokens[at]))
        return values


class Device:
    """Carries out steps, their plans, and what the scheduler says besides.

    Args:
        num_blocks: GPU blocks.
        num_slots: CPU slots.
        windows: for each KV cache group, the tokens that its attention sees; None for all, one of
            `states.KINDS`, or one of the classes above.
        late: outputs after which a copy is carried out that nothing waits for.
        fails: called with ("load" or "store", ticket): whether that copy fails.
        shards: ranks that each hold a part of every block's tokens (decode context parallelism), so
            that a block has so many times the tokens.
        drafter: what guesses tokens behind those of a step.
        unit: tokens after which a hit may end, a part of a block; 0: blocks as a whole.
    """

    def __init__(
        self,
        num_blocks: int,
        num_slots: int,
        windows: tuple[int | str | None, ...],
        late: int,
        fails: Fails,
        shards: int = 1,
        drafter: Drafter | None = None,
        unit: int = 0,
    ) -> None:
        self.drafter = drafter
        self.size = BLOCK * shards  # tokens of a block that ranks divide between them, if any do
        self._sizes = [group_size(one, shards) for one in windows]
        self.unit = unit or hash_size(windows, shards)
        # Tokens that a hash is of, and those behind them that it has as well.
        self.hashed = self.unit, drafter.hash_lookahead if drafter is not None else 0
        self.kv = [[0] * max(self._sizes) for _ in range(num_blocks)]
        self.slots = [[0] * max(self._sizes) for _ in range(num_slots)]
        self.zeroed: list[tuple[int, ...]] = []  # of each step
        self.copied = 0  # blocks, from block to block, as the scheduler wanted
        self.resumed = 0  # requests that began again
        drops = drafter is not None and drafter.use_eagle() and not drafter.hash_lookahead
        self.states = StateGroups(self.kv, BLOCK, windows, drops, *self.hashed)
        self._windows = windows
        self.replayed = 0  # tokens of hits that were computed again
        self._replays = max((one for one in windows if isinstance(one, Replay)), default=0)
        self._fails, self.reason = fails, RAISED
        self._queues = {LOAD: CopyQueue(late), STORE: CopyQueue(late)}
        self._blocks_of = {GPU: self.kv, CPU: self.slots}
        self._failed: list[tuple[Link, int]] = []
        self._failed_ever: set[tuple[Link, int]] = set()
        self._sequences: dict[str, _Sequence] = {}
        self._common: list[list[int]] = []  # blocks by group, see `cascade`

    # A step

    def step(
        self, scheduled: Any, plan: TransferPlan | None, tokens_of: Callable[[str], list[int]]
    ) -> tuple[list[str], list[list[int]], TransferResult]:
        """Carry a step out: (names, tokens sampled for each, what is done of the copies).

        Args:
            scheduled: vLLM's `SchedulerOutput`.
            plan: what rides on it.
            tokens_of: the tokens of a request that begins, or begins again.

        Raises:
            LoadFailed: nothing of this step may come out.
        """
        self._begin(plan)
        names, sampled = self.compute(scheduled, tokens_of)
        for store in plan.after if plan else ():
            self._submit(store, plan, behind=LOAD)
        return names, sampled, self._result()

    def compute(
        self, scheduled: Any, tokens_of: Callable[[str], list[int]]
    ) -> tuple[list[str], list[list[int]]]:
        """The step without its copies: (names, tokens sampled for each)."""
        self._prepare(scheduled)
        starts = self._take_in(scheduled, tokens_of)
        names = list(scheduled.num_scheduled_tokens)
        first = self._sequences[names[0]].tables if names else ()
        self._common = common_blocks(scheduled, [starts[n] for n in names], first, self.size)
        sampled = [
            self._forward(scheduled, name, starts[name], scheduled.num_scheduled_tokens[name])
            for name in names
        ]
        return names, sampled

    def drain(self) -> None:
        """Return when every copy is done."""
        for queue in self._queues.values():
            queue.drain()

    def finish(self, plan: TransferPlan | None) -> None:
        """The plan's loads without a step, and every copy; raises `LoadFailed` as a step does."""
        self._begin(plan)
        self.drain()

    def tell_drafts(self, scheduler: Any, names: Iterable[str]) -> None:
        """Of these requests; with asynchronous scheduling nobody asks."""
        if self.drafter is not None and not self.drafter.always:
            guesses = {name: self._sequences[name].guessed for name in names}
            tell(scheduler, guesses)

    @property
    def failures(self) -> int:
        """Copies that failed, as far as no plan shows that the scheduler knows."""
        return len(self._failed)

    def loads_done(self) -> int:
        """The last load done; 0 while a failed one is to be reported."""
        failed = any(link == LOAD for link, _ in self._failed)
        return 0 if failed else self._queues[LOAD].done

    def scramble(self, blocks: bool = True, slots: bool = True) -> None:
        """Whatever is in any block or slot is as wrong as with other weights."""
        for block in (*(self.kv if blocks else ()), *(self.slots if slots else ())):
            block[:] = [7] * len(block)

    def _prepare(self, scheduled: Any) -> None:
        """What a model runner does to blocks before its forward pass."""
        zeroed = tuple(getattr(scheduled, "new_block_ids_to_zero", None) or ())
        self.zeroed.append(zeroed)
        for block_id in zeroed:
            self.kv[block_id] = [0] * len(self.kv[0])
        for copy in getattr(scheduled, "kv_cache_block_copies", None) or ():
            self.copied += 1
            self.kv[copy.dst_block_id] = list(self.kv[copy.src_block_id])

    def _take_in(self, scheduled: Any, tokens_of: Callable[[str], list[int]]) -> dict[str, int]:
        """Update block tables; returns where each request's computation starts."""
        starts = {}
        for name in scheduled.finished_req_ids:
            self._sequences.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            # The second runner is told of those that begin again as if they were new.
            self.resumed += new.req_id in self._sequences
            sequence = _Sequence(tokens_of(new.req_id), tables_of(new.block_ids))
            self._sequences[new.req_id] = sequence
            starts[new.req_id] = start = new.num_computed_tokens
            if self._replays and start:
                assert new.replay_start == start, "the end of a hit is not computed again"
                sequence.replay = range(start, start + self._replays)
        for name, resumed, block_ids, start in running_of(scheduled.scheduled_cached_reqs):
            starts[name] = start
            if resumed:
                self.resumed += 1
                self._sequences[name] = _Sequence(tokens_of(name), tables_of(block_ids))
                continue
            for table, more in zip_longest(self._sequences[name].tables, tables_of(block_ids)):
                table.extend(more or ())
        return starts

    def _forward(self, scheduled: Any, name: str, start: int, count: int) -> list[int]:
        sequence = self._sequences[name]
        drafted = scheduled_drafts(scheduled, name, sequence.guessed)
        # With steps under way, vLLM's scheduler takes all their drafts to be accepted.
        start = min(start, len(sequence.tokens) - 1)
        end = start + count
        known = end - len(drafted)
        values = sequence.right(known)[:known]
        for token in drafted:
            values.append(value_after(values[-1], token))
        self.states.move(sequence, start, end)
        wrong = 0 if self._sees_right(sequence, start) else _WRONG
        self.replayed += max(0, min(end, sequence.replay.stop) - start)
        for group, table in enumerate(sequence.tables):
            if self._windows[group] in KINDS:
                continue
            ring = self._windows[group] if isinstance(self._windows[group], Ring) else 0
            size = self._sizes[group]
            for at in range(max(start, self._kept(sequence, group)), end):
                block_id = table[0 if ring else at // size]
                assert block_id, "a step computes into the null block"
                self.kv[block_id][at % (ring or size)] = values[at] + group * _GROUP + wrong
        self.states.advance(sequence, start, values, len(drafted), lambda g: g * _GROUP + wrong)
        sampled = [(value + wrong) % VOCABULARY for value in values[known - 1 :]]
        if known < len(sequence.tokens):
            sampled = []
        elif self.drafter is not None:
            sampled = self.drafter.verify(drafted, sampled)
        self.states.settle(sequence, known, max(1, len(sampled)))
        sequence.tokens += sampled
        if sampled and self.drafter is not None:
            right = answer(sequence.tokens, self.drafter.num_speculative_tokens)
            sequence.guessed = self.drafter.draft(right)
        return sampled

    def _kept(self, sequence: _Sequence, group: int) -> int:
        """Tokens of a hit that are not written: they are in the cache, computed again or not."""
        return 0 if isinstance(self._windows[group], (Replay, Ring)) else sequence.replay.stop

    def _sees_right(self, sequence: _Sequence, end: int) -> bool:
        """Whether all that a token behind ``end`` ones sees of them is right, in every group."""
        right = sequence.right(max(end, sequence.replay.stop))
        tables = read_tables(sequence.tables, self._common, self._windows)
        for group, (table, window, size) in enumerate(zip(tables, self._windows, self._sizes)):
            if window in KINDS:
                state = self.states.of(sequence, group, table, end) if end else 0
                if end and state != right[end - 1] + group * _GROUP:
                    return False
                continue
            added, stop = group * _GROUP, max(end, self._kept(sequence, group))
            if isinstance(window, Ring):
                seen = range(max(sequence.replay.start, end // 2 * 2), end)
                if any(self.kv[table[0]][at % window] != right[at] + added for at in seen):
                    return False
                continue
            if isinstance(window, Chunk):
                at = end // window * window
            else:
                all_seen = window is None or isinstance(window, (Wide, Replicated))
                at = 0 if all_seen else max(0, end - window + 1)
            if isinstance(window, Replay):
                at = max(at, sequence.replay.start)
            while at < stop:
                up_to = min(stop, (at // size + 1) * size)
                there, place = self.kv[table[at // size]], at % size
                if there[place : place + up_to - at] != [v + added for v in right[at:up_to]]:
                    return False
                at = up_to
        return True

    # Copies

    def _begin(self, plan: TransferPlan | None) -> None:
        if plan is None:
            return
        self._failed = [(link, t) for link, t in self._failed if t > plan.known_done(link)]
        self._queues[STORE].wait(plan.waits_for(STORE))
        for load in plan.before:
            self._submit(load, plan, behind=STORE)
        self._queues[LOAD].wait(plan.waits_for(LOAD))
        if broken := self._failed_ever.intersection(plan.promised):
            raise LoadFailed(f"{sorted(broken)}")

    def _submit(self, transfer: Transfer, plan: TransferPlan, behind: Link) -> None:
        link, ticket = (transfer.source, transfer.target), plan.known_done(behind)

        def copy() -> None:
            self._queues[behind].wait(ticket)
            self._copy(link, transfer)

        self._queues[link].submit(transfer.ticket, copy)

    def _copy(self, link: Link, transfer: Transfer) -> None:
        fails = self._fails("load" if link == LOAD else "store", transfer.ticket)
        source, target = (self._blocks_of[place] for place in link)
        for one, other in zip(transfer.source_ids, transfer.target_ids):
            target[other] = [7] * len(target[other]) if fails else list(source[one])
        if fails:
            self._failed.append((link, transfer.ticket))
            self._failed_ever.add((link, transfer.ticket))

    def _result(self) -> TransferResult:
        done = tuple((link, queue.poll()) for link, queue in self._queues.items())
        failed = tuple(Failure(*one, self.reason) for one in self._failed)
        return TransferResult(done, failed, by_layer=True)
