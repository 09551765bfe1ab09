"""All ranks of one engine, as the scheduler's side sees them: attached, drained, closed."""

from __future__ import annotations

import logging
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from kvoffload_patch.config import GIB, as_given
from kvoffload_patch.integration.engine.ranks.checks import (
    by_host,
    check_size,
    check_together,
    refuse_errors,
)
from kvoffload_patch.integration.engine.tuning import OPEN_TIMEOUT_S, RPC_TIMEOUT_S
from kvoffload_patch.integration.errors import TierRefused
from kvoffload_patch.integration.protocol import RankGeometry
from kvoffload_patch.integration.shared_files import SharedFile, SharedFileAddress
from kvoffload_patch.integration.slot_counts import Alarms, make_slot_counts
from kvoffload_patch.integration.worker import rpc as worker_side
from kvoffload_patch.memory import AUTO_PARTS, RESERVE_BYTES, auto_bytes
from kvoffload_patch.plan import TransferPlan

logger = logging.getLogger("vllm.kvoffload_patch")

# vLLM's executors that start a process for each rank.
_HAVE_PROCESSES = ("vllm.v1.executor.multiproc_", "vllm.v1.executor.ray_")
# Those whose workers carry out calls beside steps: of Ray's compiled graph, up to 0.10 and later.
_BESIDE_STEPS = ("vllm.v1.executor.ray_distributed_executor", "vllm.v1.executor.ray_executor")


class RankGroup:
    """The workers of an executor.

    Args:
        executor: vLLM's executor, its workers started.
        end: ends this process; None: it is not to be ended.

    Attributes:
        num_slots: CPU slots on each rank, once opened and grown.
        size: what these take over all ranks, and why so much, in words.
        num_usable: those that every rank could use when it was opened.
        block_bytes, slot_bytes: of a block, and of what it takes of CPU memory, over all ranks.
            What ranks have in common counts once.
        growing: whether these become more.
        load_ms_per_block: of the slowest rank, once opened.
        copies: how blocks are copied, in words.
        copies_overlap: whether copies run beside the forward pass, or within the step.
        compares: whether every rank can compare loads with checksums.
        overlap: which part of a load may be on its way when the step that reads it begins; 0 where
            the forward pass waits for loads as a whole.
        told_of_all: what is said to be done is done on every rank. Where ranks share no memory, one
            may be behind that which reports.
        silent: a rank has not answered in time, or the wait was interrupted: none is asked again,
            because vLLM would take a late answer for that to the next call.
    """

    def __init__(self, executor: Any, end: Callable[[], object] | None = None) -> None:
        self._executor = executor
        self._end = end
        self.num_slots = self.num_usable = self.block_bytes = self.slot_bytes = 0
        self.load_ms_per_block = self.overlap = 0.0
        self.copies = self.size = ""
        self.copies_overlap = self.growing = self.compares = False
        self._common: tuple[tuple[int, ...], ...] = ()  # ranks that have slots in common
        self.silent, self.told_of_all = False, True
        self._alarms: Alarms | None = None

    def open(
        self,
        cpu_bytes: int | None,
        backend: str = "auto",
        engines: int = 1,
        integrity: str = "off",
        by_layer: bool = False,
    ) -> None:
        """Divide ``cpu_bytes`` over the ranks and open the tier on every one.

        Args:
            cpu_bytes: of all ranks of this engine; None: a share of what each host can give.
            backend: how blocks are copied.
            engines: of the server, which share what a host can give.
            integrity: which loads are compared with checksums.
            by_layer: whether the forward pass may wait for loads layer by layer.

        Raises:
            TierRefused: naming every rank that cannot take part, and why. Some ranks may have taken
                memory: `give_back`.
        """
        ranks = self._call(worker_side.describe_rank)
        check_together(ranks)
        _say_hosts(ranks)
        with self._shared(ranks, integrity) as (board, files):
            self._common = tuple(file.address.ranks for file in files)
            self.told_of_all = board is not None or len(ranks) == 1
            self._divide(ranks, cpu_bytes, engines)
            for file in files:
                member = next(r for r in ranks if r.rank in file.address.ranks)
                file.resize(self.num_slots * member.slot_bytes)
            shared = board, [file.address for file in files]
            how = self.num_slots, backend, integrity, *shared, by_layer, self._end_of_ranks()
            opened = self._call(worker_side.open_rank, *how, timeout_s=OPEN_TIMEOUT_S)
        refuse_errors(opened, "failed to open the CPU tier")
        self.num_usable = min(r.num_ready for r in opened)
        self.growing = any(r.growing for r in opened)
        slowest = max(opened, key=lambda r: r.load_ms_per_block)
        self.load_ms_per_block, self.copies = slowest.load_ms_per_block, slowest.copies
        self.copies_overlap = ranks[0].device != "cpu"
        self.compares = all(r.compares for r in opened)
        self.overlap = min(r.overlap for r in opened)

    @property
    def sharing(self) -> int:
        """How many ranks have slots in common, and each compares what it has stored; 1: none."""
        return max(map(len, self._common), default=1)

    def _end_of_ranks(self) -> Callable[[], object] | None:
        """What ends the process of a rank; None where that may be a user's own."""
        classes = type(self._executor).__mro__
        if any(c.__module__.startswith(_HAVE_PROCESSES) for c in classes):
            return worker_side.end_process
        return self._end if hasattr(self._executor, "driver_worker") else None

    @property
    def beside_steps(self) -> bool:
        """Whether workers may carry out a call before a step that was sent before it."""
        return any(c.__module__ in _BESIDE_STEPS for c in type(self._executor).__mro__)

    @property
    def answers_apart(self) -> bool:
        """Whether a late answer is no other call's: Ray's has a name, a rank here answers itself.

        vLLM's own processes answer in a queue each, which has nothing but the order.
        """
        return self.beside_steps or hasattr(self._executor, "driver_worker")

    def _divide(self, ranks: Sequence[RankGeometry], cpu_bytes: int | None, engines: int) -> None:
        """Find how many slots there are to be."""
        counted, why = self._counted(ranks), ""
        hosts = by_host(counted)
        self.block_bytes = sum(r.block_bytes for r in counted)
        self.slot_bytes = slot_bytes = sum(r.slot_bytes for r in counted)
        if cpu_bytes is None:
            self.num_slots, why = _automatic(hosts, engines)
        else:
            self.num_slots = cpu_bytes // slot_bytes
        check_size(hosts, cpu_bytes, self.num_slots, slot_bytes)
        self.size = f"{self.num_slots * slot_bytes / GIB:.2f} GiB over all ranks{why}"
        if self._common:
            held = ", ".join(" and ".join(map(str, members)) for members in self._common)
            self.size += f", one copy for ranks that hold the same bytes ({held})"

    def _counted(self, ranks: Sequence[RankGeometry]) -> list[RankGeometry]:
        """The ranks, with what they have in common counted for the first of them."""
        others = {rank for members in self._common for rank in members[1:]}
        return [replace(r, block_bytes=0, slot_bytes=0) if r.rank in others else r for r in ranks]

    def step_failure(self) -> str:
        """Why no token of a step may be given away: a rank that reports nothing could not do it.

        Asked when its output is whole. Empty if all could, or they share no memory.
        """
        said = self._alarms.said() if self._alarms is not None else ""
        return as_given(said) if said else ""

    def drain(self) -> bool:
        """Return when no rank has a copy under way; plans sent before are carried out first.

        Returns:
            Whether no copy has failed of which the scheduler may not have heard.
        """
        return all(self._call(worker_side.drain_rank))

    @property
    def asleep(self) -> bool:
        """Whether vLLM has given back memory of the ranks, so that weights cannot be read."""
        return bool(getattr(self._executor, "is_sleeping", False))

    def weights(self) -> tuple[str, ...]:
        """A digest of each rank's weights; empty for one that cannot compare them."""
        return tuple(self._call(worker_side.digest_weights))

    def wipe(self) -> None:
        """Overwrite the slots of every rank, once its copies are done; no key may be known."""
        if self._common:
            self.drain()  # what one rank overwrites, another may be loading from
        self._call(worker_side.wipe_rank)

    def check_room(self, more: int) -> None:
        """Raises TierRefused unless every host has memory for so many more slots."""
        ranks = self._call(worker_side.describe_rank)
        refuse_errors(ranks, "cannot say what memory it has")
        for host, members in by_host(self._counted(ranks)).items():
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
        if self._common:
            self.drain()  # what one rank gives back, another may be loading from
        found = self._call(worker_side.resize_rank, num_slots, sizing, timeout_s=OPEN_TIMEOUT_S)
        return min(ready for ready, _ in found), any(growing for _, growing in found)

    def finish(self, plan: TransferPlan | None) -> None:
        """Carry out a plan's loads on every rank, wait for all copies, and close every rank.

        Plans sent before are carried out first. A rank closes whatever fails.

        Raises:
            TierRefused: a load that is promised has failed on a rank, or a rank does not answer, or
                has not before.
        """
        self._call(worker_side.finish_rank, plan)

    def give_back(self) -> None:
        """There will be no tier: free what ranks have taken for one."""
        if not self.silent:
            with suppress(TierRefused):
                self._call(worker_side.close_rank)

    def close(self) -> None:
        """Free the memory of a worker in this process; those in others free it by ending."""
        if hasattr(self._executor, "driver_worker") and not self.silent:
            self._call(worker_side.close_rank)

    @contextmanager
    def _shared(
        self, ranks: Sequence[RankGeometry], integrity: str
    ) -> Iterator[tuple[SharedFileAddress | None, list[SharedFile]]]:
        """What several ranks share: a board, and slots where they hold the same bytes.

        No board if they have no memory in common, or there is one rank only. Slots only if all
        have a board, because another's copies must be known to be done. Where all loads are
        compared each has its own slots: a rank has no checksum of what another has stored.
        """
        board = make_slot_counts([r.rank for r in ranks]) if len(ranks) > 1 else None
        if board is None:
            yield None, []
            return
        files = _files_of(ranks) if integrity != "full" else []
        try:
            addresses = [file.address for file in files]
            reached = self._call(worker_side.can_share, board.address, addresses)
            has_board = all(found for found, _ in reached) and self._watch(board)
            has_slots = has_board and all(found for _, found in reached)
            if _alike(ranks) and not (files and has_slots):
                _say_apart(has_board, integrity)
            yield board.address if has_board else None, files if has_slots else []
        finally:
            for file in (board, *files):
                file.close()

    def _watch(self, board: SharedFile) -> bool:
        """See what ranks say there, on which one that does not raise relies; False: it cannot."""
        try:
            self._alarms = Alarms(board)
        except OSError:
            return False
        return True

    def _call(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = RPC_TIMEOUT_S
    ) -> list[Any]:
        name = function.__name__
        if self.silent:
            raise TierRefused(
                f"expected every worker to have answered before {name} is sent, found one that has "
                "not, whose late answer would be taken for that to another call; restart the "
                "server."
            )
        try:
            sent, timeout = worker_side.answering(function), max(timeout_s, _step_timeout_s())
            answers = self._executor.collective_rpc(sent, timeout=timeout, args=args)
        except BaseException as error:
            interrupted = not isinstance(error, Exception)
            self.silent = isinstance(error, TimeoutError) or interrupted and not self.answers_apart
            if interrupted:
                raise
            raise TierRefused(
                f"expected every worker to answer {name}, found {type(error).__name__} ({error}); "
                "see the workers' own messages."
            ) from error
        failed = [text for done, text in answers if not done]
        if failed:
            raise TierRefused(
                f"expected every worker to answer {name}, found {failed[0]} on {len(failed)} of "
                f"{len(answers)}; install the same kvoffload_patch wherever a worker runs."
            )
        return [answer for _, answer in answers]


def _step_timeout_s() -> float:
    """For how long vLLM waits for a step, behind which a call may have to wait."""
    with suppress(ValueError):  # vLLM itself says that
        return float(os.environ.get("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "0"))
    return 0.0


def _alike(ranks: Sequence[RankGeometry]) -> list[list[int]]:
    """Ranks of one host that hold the same bytes, together."""
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for r in ranks:
        if r.same_bytes:
            found[r.host, r.same_bytes].append(r.rank)
    return [members for members in found.values() if len(members) > 1]


def _files_of(ranks: Sequence[RankGeometry]) -> list[SharedFile]:
    """Files for the slots that ranks have in common; none where this system has no such files."""
    files: list[SharedFile] = []
    with suppress(OSError, AttributeError):
        for members in _alike(ranks):
            files.append(SharedFile(members))
    return files


def _say_apart(has_board: bool, integrity: str) -> None:
    why = "they cannot map memory of this engine together"
    if integrity == "full":
        why = "KVOFFLOAD_INTEGRITY=full has checksums of what a rank itself has stored"
    elif not has_board:
        why = "the ranks of this engine share no memory to tell each other what is done"
    logger.info(
        "kvoffload_patch: some ranks hold the same bytes, and each keeps a copy of them: %s.",
        as_given(why),
    )


def _say_hosts(ranks: Sequence[RankGeometry]) -> None:
    """Say so if ranks on several hosts hold the same bytes: memory in common ends with a host."""
    found: dict[str, set[str]] = defaultdict(set)
    for r in ranks:
        if r.same_bytes:
            found[r.same_bytes].add(r.host)
    most = max(map(len, found.values()), default=0)
    if most > 1:
        logger.info(
            "kvoffload_patch: ranks on %d hosts hold the same bytes, and each host keeps a copy of "
            "them: hosts share no memory.",
            most,
        )


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
