"""One rank's side of the tier: what each step carries out, and what is said of it.

Runs in the worker. `rpc` opens and closes it for the engine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvoffload_patch.config import as_given
from kvoffload_patch.integration.shared_files import SharedFileAddress
from kvoffload_patch.integration.slot_counts import SlotCounts
from kvoffload_patch.integration.worker.layer_gate import LayerGate
from kvoffload_patch.integration.worker.lost import check_reads_nothing
from kvoffload_patch.integration.worker.memory import open_host
from kvoffload_patch.integration.worker.promises import check_promises, wait_for_known
from kvoffload_patch.integration.worker.step_order import StepOrder
from kvoffload_patch.integration.worker.tuning import IDLE_WAIT_S, MEASURED_BYTES
from kvoffload_patch.integration.worker.vllm_runner import (
    block_layout,
    compute_into_no_block,
    copy_output,
    first_pointer,
)
from kvoffload_patch.links import LOAD, STORE, Failure, Link
from kvoffload_patch.plan import TransferPlan, TransferResult

logger = logging.getLogger("vllm.kvoffload_patch")


class RankTier:
    """Carries out plans for one model runner.

    Args:
        runner: vLLM's model runner, its KV cache initialised.
        num_slots: CPU slots, all of which are usable sooner or later.
        backend: copy backend, or ``auto``.
        alone: this is the only rank, so what it can use is what all can.
        board: what several ranks share: what is done is what all of them have done, and what has
            failed on any has failed. Without one they wait here until no rank grows any more.
        integrity: which loads are compared with checksums.
        common: where ranks have their slots in common.
        rank: of this runner, among those.
        by_layer: whether the forward pass waits for loads layer by layer where it can.
        end: ends this process, see `CopyEngine`.

    Attributes:
        load_ms_per_block: milliseconds that a block took to load when the tier was opened.
        copies: how blocks are copied, in words.
        overlap: which part of a load may be on its way when the step that reads it begins.
        compares: whether loads can be compared with checksums.
        order: whose turn it is, for calls by RPC.
        ends: as ``end``, where nobody hears what this rank raises within a step.

    Raises:
        TransferError: the layout, the memory, the copy backend or the canary.
    """

    ends: Callable[[], object] | None = None
    # What comes of a failed copy, in words.
    failed_blocks = "its blocks are recomputed when they are needed"
    _lost: BaseException | None = None  # what a step has failed with: none begins any more

    def __init__(
        self,
        runner: Any,
        num_slots: int,
        backend: str = "auto",
        alone: bool = True,
        board: SlotCounts | None = None,
        integrity: str = "off",
        common: Sequence[SharedFileAddress] = (),
        rank: int = 0,
        by_layer: bool = False,
        end: Callable[[], object] | None = None,
    ) -> None:
        shared = next((address for address in common if rank in address.ranks), None)
        self._board, self._runner = board, runner
        self._gate: LayerGate | None = None
        self._warned: set[tuple[Link, str]] = set()
        layout = block_layout(runner)
        self._pointer = first_pointer(runner)  # the layout keeps the tensors, so no other has it
        self._host = open_host(runner, num_slots, layout, shared)
        self._opened = time.monotonic()
        self._growth_told = self._host.num_ready == num_slots
        self._idle, self._sizing = False, 0
        self._beside_connector = getattr(runner.vllm_config, "kv_transfer_config", None) is not None
        try:
            # What every rank can use, and whether it becomes more; None: nobody here knows it.
            self._tells_slots = alone or board is not None
            self._usable: tuple[int | None, bool] = (None, self._tells_slots)
            measured = MEASURED_BYTES // layout.block_bytes if self._tells_slots else num_slots
            ready = self._host.wait_up_to(measured)
            own = (shared.ranks.index(rank), len(shared.ranks)) if shared else (0, 1)
            self._open_copies(layout, ready, backend, integrity, own, by_layer, end)
        except BaseException:
            if self._gate is not None:
                self._gate.close()
            self._host.close()
            raise

    def _open_copies(
        self,
        layout: Any,
        ready: int,
        backend: str,
        integrity: str,
        own: tuple[int, int],
        by_layer: bool,
        end: Callable[[], object] | None,
    ) -> None:
        """Choose a backend by its speed with the first slots, and prove a block's round trip.

        ``own``: as `Turn`, which slots this rank stores to.
        """
        from kvoffload_patch.transfer.backends.choose import choose_backend, load_groups
        from kvoffload_patch.transfer.backends.slots import SlotMemory
        from kvoffload_patch.transfer.canary import run_canary
        from kvoffload_patch.transfer.device import device_of
        from kvoffload_patch.transfer.engine import CopyEngine
        from kvoffload_patch.transfer.turns import Turn

        slots = SlotMemory(self._host.slots, self._host.slots_per_piece)
        self._gate = LayerGate(self._runner, layout, load_groups(layout)) if by_layer else None
        gate = self._gate
        groups = gate.groups if gate else ()
        with self._host.quiet():
            complete = own[1] == 1
            chosen = choose_backend(layout, slots, ready, backend, integrity, groups, complete)
            run_canary(layout, chosen.backend, slot=ready - 1)
        self.load_ms_per_block, self.copies = chosen.load_ms_per_block, chosen.report
        self.overlap = 1 - 1 / max(1, len(chosen.backend.groups))
        if gate is not None and groups and not chosen.backend.groups:
            gate.shut(f"copies {chosen.backend.name} bring all layers of a block at once")
        self._checksums, self._load_times = chosen.backend.checksums, chosen.backend.load_times
        self.compares = self._checksums.kept
        self._load_ms_per_byte = chosen.load_ms_per_block / layout.block_bytes
        if self._load_times is not None:
            self._load_times.start_from(self._load_ms_per_byte)
        # What was stored to try it has none: another rank may be the one that stores there.
        self._checksums.forget_all()
        wait_ready, turn = self._host.wait_ready, Turn(*own)
        self._engine = CopyEngine(layout, chosen.backend, wait_ready, turn=turn, end=end)
        self.order = StepOrder(device_of(layout.device).synchronize)  # it outlives the engine

    @property
    def num_ready(self) -> int:
        """CPU slots usable so far."""
        return int(self._host.num_ready)

    @property
    def growing(self) -> bool:
        """Whether more slots will become usable."""
        return bool(self._host.growing)

    def begin_step(self, plan: TransferPlan | None, step: Any) -> None:
        """Before the forward pass of a step, as vLLM's scheduler describes it.

        Raises:
            RuntimeError: a load that the step reads has failed, the KV tensors were replaced, or a
                step before has failed: who goes on after that has its blocks in the prefix cache.
        """
        try:
            self._check_not_lost()
            if self.order.step_begins():
                self._begin_step(plan, step)
            else:
                check_reads_nothing(plan)
        except BaseException as error:  # noqa: BLE001 - raised again, or told to the engine
            self._failed(error)

    def end_forward(self) -> None:
        """After the forward pass, before anything reads what it has computed.

        Raises:
            RuntimeError: a layer has not waited for its load.
        """
        try:
            if self._gate is not None:
                self._engine.wait_all_groups()
                self._gate.end()
        except BaseException as error:  # noqa: BLE001 - raised again, or told to the engine
            self._failed(error)

    def end_step(self, output: Any) -> Any:
        """After the forward pass and what follows it: submit the store, report what is done."""
        if self.order.closed:  # since the step was sent
            return output
        try:
            output = self._end_step(output)
            self.order.step_ends()
            return output
        except BaseException as error:  # noqa: BLE001 - raised again, or told to the engine
            self._failed(error)
            return output

    def step_raised(self) -> None:
        """vLLM has raised within the step: no end of it follows, and who goes on may call first."""
        self.order.step_ends()
        if not self.order.closed:
            self._engine.step_raised()

    def _begin_step(self, plan: TransferPlan | None, step: Any) -> None:
        if not self._growth_told:
            self._tell_growth(plan)
        if plan is not None and self._moved():
            raise RuntimeError(
                "kvoffload_patch: the KV tensors of this rank were replaced after the CPU tier "
                "was attached, so it cannot go on; restart the server, or set "
                "KVOFFLOAD_DISABLE=1 to serve without it."
            )
        self._idle = step.total_num_scheduled_tokens == 0
        if plan is not None and self._idle:
            compute_into_no_block(self._runner)
        check_promises(self._engine, plan)  # what it shows as taken in is forgotten
        gate = self._gate
        awaited = self._engine.begin_step(plan, gate is not None and gate.passes(step))
        if gate is not None:
            gate.begin(step, self._engine.wait_group if awaited else None)
        if plan is None:
            return
        if self._beside_connector:
            self._wait_for_handed_out(plan)
        if self.compares:
            wait_for_known(self._engine, plan)
        check_promises(self._engine, plan)

    def _end_step(self, output: Any) -> Any:
        self._engine.end_step()
        if not self._growth_told:
            self._host.step_ends()
        if self._idle:
            # Nothing else can go on until a load has arrived or a request comes in.
            self._engine.wait_loads(IDLE_WAIT_S)
        if not self._growth_told and not self.growing:
            self._growth_told = True
            self._say_growth_is_over()
        done, failed, *_ = self._engine.poll()
        if failed:
            self._warn_of_failures(failed)
        if self._board is not None:
            done, failed = self._board.exchange_done(done, failed)
        usable, by_layer = self._usable_slots(), self._gate is not None and self._gate.learnt
        found = self._checksums.mismatches, self._sizing
        result = TransferResult(done, failed, *usable, *found, by_layer, self._slowdown())
        return copy_output(output, result)

    def _slowdown(self) -> float:
        """How long a load takes lately, in times of what it took when the tier was opened."""
        ms = self._load_times.ms_per_byte() if self._load_times is not None else 0.0
        return ms / self._load_ms_per_byte if ms and self._load_ms_per_byte else 1.0

    def drain(self) -> bool:
        """Return when every copy is done: whether none failed that the engine may not know of."""
        well = self._engine.drain()
        self._warn_of_failures(self._engine.poll().failed)  # told by the answer: no plan may follow
        return well

    def resize(self, num_slots: int, sizing: int) -> tuple[int, bool]:
        """Use so many slots, when every copy is done; memory that is not needed is given back.

        Args:
            num_slots: as many as the tier was opened with, at most.
            sizing: what this change is called in the results to come.

        Returns:
            Slots usable now, and whether they become more.
        """
        self._engine.drain()
        self._host.resize(num_slots)
        self._sizing = sizing
        if not self._tells_slots:
            self._host.wait_up_to(num_slots)
        self._growth_told = self.num_ready == num_slots
        self._opened = time.monotonic()
        found = self.num_ready, self.growing
        if self._tells_slots:
            # Others may not have come to this yet, so what the board says counts from now on only.
            if self._board is not None:
                self._board.exchange(*found)
            self._usable = (found[0], True)
        return found

    def wipe(self) -> None:
        """Overwrite every slot, once the copies under way are done."""
        self._engine.drain()
        self._host.wipe()

    def finish(self, plan: TransferPlan | None) -> None:
        """Carry out the loads of a plan that comes without a step, and wait for every copy.

        Raises:
            RuntimeError: a load that is promised has failed, or a step before. One that was
                interrupted has given no token, and what it had not loaded vLLM takes for computed,
                as in any step that it raises within.
        """
        if isinstance(self._lost, Exception):
            self._check_not_lost()
        check_promises(self._engine, plan)
        self._engine.begin_step(plan)
        self._engine.drain()
        check_promises(self._engine, plan)

    def close(self) -> None:
        """Drain and free.

        Raises:
            TransferError: a copy is past its deadline; what it may read or write is not freed.
        """
        self.order.closed = True
        if self._gate is not None:
            self._gate.close()
            self._gate = None
        self._engine.close()
        del self._engine
        self._host.close()

    def _wait_for_handed_out(self, plan: TransferPlan) -> None:
        """Copies of blocks that this step hands out are done when the host goes on.

        A KV connector may fill such a block without the order of the stream, as a read over the
        network does, and the copy would read what it brings or write over it. The forward pass
        waits for these on its stream in any case. Nearly always they are long done.
        """
        given_back = min(plan.waits_for(LOAD), plan.known_done(LOAD))
        self._engine.wait_done(((STORE, plan.waits_for(STORE)), (LOAD, given_back)))

    def _failed(self, error: BaseException) -> None:
        """A part of a step has raised this: no step begins any more."""
        self._lost = self._lost or error
        self.step_raised()
        if not isinstance(error, Exception):
            raise error
        self._tell(error)

    def _tell(self, error: Exception) -> None:
        raise error

    def _check_not_lost(self) -> None:
        if self._lost is not None:
            raise RuntimeError(
                "kvoffload_patch: expected no step after one that has failed on this rank "
                f"({self._lost}), found one that may read what it lacked; restart the server."
            ) from self._lost

    def _warn_of_failures(self, failed: tuple[Failure, ...]) -> None:
        """Say why a copy failed: the first of each direction by each reason."""
        for link, ticket, reason in failed:
            kind = link, reason
            found = None if kind in self._warned else self._engine.failed(((link, ticket),))
            if found is not None:
                self._warned.add(kind)
                logger.warning(
                    "kvoffload_patch: copy %d from %s to %s has failed (%s); %s, and further "
                    "failures from %s to %s by this reason (%s) are only counted.",
                    ticket, *link, found[2], self.failed_blocks, *link, reason,
                )  # fmt: skip

    def _usable_slots(self) -> tuple[int | None, bool]:
        """CPU slots usable on every rank, and whether they will become more."""
        if self._usable[1]:
            growing = self.growing  # asked first: when it says no, their number is final
            own = self.num_ready
            self._usable = self._board.exchange(own, growing) if self._board else (own, growing)
        return self._usable

    def _tell_growth(self, plan: TransferPlan | None) -> None:
        blocks, last_slot = 0, -1
        if plan is not None:
            blocks = sum(len(load.source_ids) for load in plan.before)
            last_slot = max([max(store.target_ids) for store in plan.after], default=-1)
        self._host.step_begins(blocks * self.load_ms_per_block / 1000, last_slot)

    def _say_growth_is_over(self) -> None:
        if self._host.growth_ended:
            logger.warning("kvoffload_patch: %s", as_given(self._host.growth_ended))
            return
        logger.info(
            "kvoffload_patch: all %d CPU slots are usable, seen %.1f s after the first of them: %s",
            self._host.num_ready, time.monotonic() - self._opened, self._host.growth_spent,
        )  # fmt: skip

    def _moved(self) -> bool:
        return bool(first_pointer(self._runner) != self._pointer)
