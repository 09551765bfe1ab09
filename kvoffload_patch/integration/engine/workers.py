"""All ranks of one engine, as the scheduler's side sees them: attached, drained, closed."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from kvoffload_patch.config import GIB
from kvoffload_patch.integration.engine.tuning import OPEN_TIMEOUT_S, RPC_TIMEOUT_S
from kvoffload_patch.integration.errors import TierRefused
from kvoffload_patch.integration.protocol import RankGeometry
from kvoffload_patch.integration.slot_counts import SlotCountsAddress, make_slot_counts
from kvoffload_patch.integration.worker import rpc as worker_side
from kvoffload_patch.memory import AUTO_PARTS, RESERVE_BYTES, auto_bytes
from kvoffload_patch.tier.plan import TransferPlan


class RankHere(Protocol):
    """The only rank, in this process."""

    def loads_done(self) -> int: ...
    def while_waiting(self, meanwhile: Callable[[Callable[[], bool]], None] | None) -> None: ...
    def load_ahead(self, plan: TransferPlan) -> None: ...


class RankGroup:
    """The workers of an executor.

    Args:
        executor: vLLM's executor, its workers started.

    Attributes:
        num_slots: CPU slots on each rank, once opened and grown.
        size: what these take over all ranks, and why so much, in words.
        num_usable: those that every rank could use when it was opened.
        block_bytes, slot_bytes: of a block, and of what it takes of CPU memory, over all ranks.
        growing: whether these become more.
        load_ms_per_block: of the slowest rank, once opened.
        copies: how blocks are copied, in words.
        copies_overlap: whether copies run beside the forward pass, or within the step.
    """

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.num_slots = self.num_usable = self.block_bytes = self.slot_bytes = 0
        self.load_ms_per_block = 0.0
        self.copies = self.size = ""
        self.copies_overlap = self.growing = False
        self._here: RankHere | None = None  # the only rank, if it is in this process
        self._silent = False  # a rank has not answered in time

    def open(
        self,
        cpu_bytes: int | None,
        backend: str = "auto",
        engines: int = 1,
        integrity: str = "off",
    ) -> None:
        """Divide ``cpu_bytes`` over the ranks and open the tier on every one.

        Args:
            cpu_bytes: of all ranks of this engine; None: a share of what each host can give.
            backend: how blocks are copied.
            engines: of the server, which share what a host can give.
            integrity: which blocks have checksums.

        Raises:
            TierRefused: naming every rank that cannot take part, and why. Some ranks may have taken
                memory: `give_back`.
        """
        ranks = self._call(worker_side.describe_rank)
        _refuse_errors(ranks, "cannot take part")
        if len({(r.num_blocks, r.device) for r in ranks}) != 1:
            found = ", ".join(f"rank {r.rank}: {r.num_blocks} on {r.device}" for r in ranks)
            raise TierRefused(f"expected the same KV blocks on every rank, found {found}.")
        self.block_bytes = sum(r.block_bytes for r in ranks)
        self.slot_bytes = slot_bytes = sum(r.slot_bytes for r in ranks)
        hosts = _hosts(ranks)
        why = ""
        if cpu_bytes is None:
            self.num_slots, why = _automatic(hosts, engines)
        else:
            self.num_slots = cpu_bytes // slot_bytes
        _check_size(hosts, cpu_bytes, self.num_slots, slot_bytes)
        self.size = f"{self.num_slots * slot_bytes / GIB:.2f} GiB over all ranks{why}"
        with self._board([r.rank for r in ranks]) as board:
            how = self.num_slots, backend, integrity, board
            opened = self._call(worker_side.open_rank, *how, timeout_s=OPEN_TIMEOUT_S)
        _refuse_errors(opened, "failed to open the CPU tier")
        self.num_usable = min(r.num_ready for r in opened)
        self.growing = any(r.growing for r in opened)
        slowest = max(opened, key=lambda r: r.load_ms_per_block)
        self.load_ms_per_block, self.copies = slowest.load_ms_per_block, slowest.copies
        self.copies_overlap = ranks[0].device != "cpu"
        if len(ranks) == 1:
            [rank] = self._call(worker_side.rank_here, worker_side.this_process())
            self._here = rank

    def loads_done(self) -> int:
        """The last load done by now, where the only rank is in this process; else 0.

        The same comes with the output of a step, one or two steps later. Of loads that have
        failed only that tells.
        """
        return self._here.loads_done() if self._here is not None else 0

    def while_waiting(self, meanwhile: Callable[[Callable[[], bool]], None] | None) -> bool:
        """Call this before the engine waits for a step; None: no more; whether it will be called.

        It will where the only rank is in this process and its steps run beside the host.

        Args:
            meanwhile: given what says whether the step is over.
        """
        if self._here is None or not self.copies_overlap:
            return False
        self._here.while_waiting(meanwhile)
        return True

    def load_ahead(self, plan: TransferPlan) -> None:
        """Have the rank submit loads between two steps, from within what `while_waiting` calls.

        The step under way must not use the GPU blocks that they fill.
        """
        assert self._here is not None
        self._here.load_ahead(plan)

    def drain(self) -> None:
        """Return when no rank has a copy under way; plans sent before are carried out first."""
        self._call(worker_side.drain_rank)

    def wipe(self) -> None:
        """Overwrite the slots of every rank, once its copies are done; no key may be known."""
        self._call(worker_side.wipe_rank)

    def check_room(self, more: int) -> None:
        """Raises TierRefused unless every host has memory for so many more slots."""
        ranks = self._call(worker_side.describe_rank)
        _refuse_errors(ranks, "cannot say what memory it has")
        for host, members in _hosts(ranks).items():
            needed = more * sum(r.slot_bytes for r in members) + RESERVE_BYTES
            found = min(r.available_bytes for r in members)
            if needed > found:
                raise TierRefused(
                    f"expected {needed / GIB:.1f} GiB available on {host}, "
                    f"{RESERVE_BYTES / GIB:.0f} GiB to stay free included, found "
                    f"{found / GIB:.1f} GiB; ask for less."
                )

    def resize(self, num_slots: int, sizing: int) -> tuple[int, bool]:
        """Have every rank use so many slots, `num_slots` at most, once its copies are done.

        Returns:
            Slots usable on every rank now, and whether they become more.
        """
        found = self._call(worker_side.resize_rank, num_slots, sizing, timeout_s=OPEN_TIMEOUT_S)
        return min(ready for ready, _ in found), any(growing for _, growing in found)

    def finish(self, plan: TransferPlan | None) -> None:
        """Carry out a plan's loads on every rank, wait for all copies, and close every rank.

        Plans sent before are carried out first. A rank closes whatever fails.

        Raises:
            TierRefused: a load that is promised has failed on a rank, or a rank does not answer.
        """
        self.while_waiting(None)
        self._here = None
        self._call(worker_side.finish_rank, plan)

    def give_back(self) -> None:
        """There will be no tier: free what ranks have taken for one.

        A rank that has not answered in time is not asked again: what it answers late would be
        taken for the answer to the next call.
        """
        if not self._silent:
            with suppress(TierRefused):
                self._call(worker_side.close_rank)

    def close(self) -> None:
        """Free the memory of a worker in this process; those in others free it by ending."""
        if hasattr(self._executor, "driver_worker"):
            self._call(worker_side.close_rank)

    @contextmanager
    def _board(self, ranks: Sequence[int]) -> Iterator[SlotCountsAddress | None]:
        """What several ranks share; None if they have nothing in common, or there is one only."""
        board = make_slot_counts(ranks) if len(ranks) > 1 else None
        if board is None:
            yield None
            return
        try:
            yield board if all(self._call(worker_side.can_share, board)) else None
        finally:
            board.remove()

    def _call(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = RPC_TIMEOUT_S
    ) -> list[Any]:
        name = function.__name__
        try:
            answers = self._executor.collective_rpc(
                worker_side.answering(function), timeout=timeout_s, args=args
            )
        except Exception as error:
            self._silent = isinstance(error, TimeoutError)
            raise TierRefused(
                f"expected every worker to answer {name}, found {type(error).__name__} ({error}); "
                "see the workers' own messages."
            ) from error
        failed = [text for done, text in answers if not done]
        if failed:
            raise TierRefused(
                f"expected every worker to answer {name}, found {failed[0]} on {len(failed)} of "
                f"{len(answers)} (is kvoffload_patch installed where every worker runs?)."
            )
        return [answer for _, answer in answers]


def _refuse_errors(answers: Sequence[Any], what: str) -> None:
    failed = [f"rank {a.rank} (pid {a.pid}) {what}: {a.error}" for a in answers if a.error]
    if failed:
        raise TierRefused("; ".join(failed))


def _hosts(ranks: Sequence[RankGeometry]) -> dict[str, list[RankGeometry]]:
    found: dict[str, list[RankGeometry]] = defaultdict(list)
    for r in ranks:
        found[r.host].append(r)
    return found


def _automatic(hosts: Mapping[str, Sequence[RankGeometry]], engines: int) -> tuple[int, str]:
    """Slots that take their share of the host that can give least, and why so many."""
    num_slots, why = sys.maxsize, ""
    for host, members in hosts.items():
        can_give = min(r.shareable_bytes for r in members) + sum(r.early_bytes for r in members)
        fit = auto_bytes(can_give) // engines // sum(r.slot_bytes for r in members)
        if fit < num_slots:
            num_slots = fit
            why = (
                f", chosen: 1/{AUTO_PARTS * engines} of the {can_give / GIB:.1f} GiB that {host} "
                f"can give, {RESERVE_BYTES / GIB:.0f} GiB of which stay free"
            )
    return num_slots, why


def _check_size(
    hosts: Mapping[str, Sequence[RankGeometry]],
    cpu_bytes: int | None,
    num_slots: int,
    slot_bytes: int,
) -> None:
    for host, members in hosts.items():
        needed = max(1, num_slots) * sum(r.slot_bytes for r in members)
        room = min(r.available_bytes for r in members) + sum(r.early_bytes for r in members)
        if needed + RESERVE_BYTES > room:
            fits = max(0, room - RESERVE_BYTES) / GIB
            raise TierRefused(
                f"the CPU tier would take {needed / GIB:.1f} GiB on {host}, where {fits:.1f} GiB "
                f"fit: {room / GIB:.1f} GiB are available, of which {RESERVE_BYTES / GIB:.0f} GiB "
                "stay free; lower KVOFFLOAD_CPU_GIB, or free memory."
            )
    if num_slots < 1:
        found = "auto" if cpu_bytes is None else f"{cpu_bytes / GIB:.6f}"
        raise TierRefused(
            f"expected KVOFFLOAD_CPU_GIB to hold at least one block of "
            f"{slot_bytes / GIB:.6f} GiB over all ranks, found {found}; raise it."
        )
