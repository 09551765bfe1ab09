"""How the memory of CPU slots is registered with the driver, piece after piece, while vLLM runs."""

from __future__ import annotations

import logging
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvoffload_patch.threads import EXIT_S, JoinedThread
from kvoffload_patch.transfer.device import Registrar
from kvoffload_patch.transfer.errors import CannotRegister, NoSlots, TransferError
from kvoffload_patch.transfer.memory.mapping import GIB, HostMapping
from kvoffload_patch.transfer.tuning import (
    GROWTH_PARTS,
    LAUNCH_PASSES_S,
    LOADS_PASS_S,
    PAUSE_TIMES,
)

logger = logging.getLogger("vllm.kvoffload_patch")

# Memory that the driver may still be registering: it stays, for as long as the process.
_NOT_FREED: list[torch.Tensor] = []


@dataclass
class Spent:
    """What growing has taken, in seconds: until pages were there, in the driver, held back."""

    touching: float = 0.0
    registering: float = 0.0
    held_back: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.touching:.1f} s waiting for pages, {self.registering:.1f} s registering, "
            f"{self.held_back:.1f} s held back"
        )


class Growth:
    """Registers the pieces of a mapping in turn.

    Args:
        mapping: its first bytes are the slots.
        num_slots: of ``pitch`` bytes each, all of them.
        slots_per_piece: slots that are registered in one call.
        registrar: the device's.
        available_bytes: memory that may still be taken, now; for the sentence that says why not.

    Attributes:
        num_ready: slots registered so far.
        ended: why there will be no more, in a sentence; empty if all are there or coming.
        spent: where the time went so far.
    """

    def __init__(
        self, mapping: HostMapping, num_slots: int, pitch: int, slots_per_piece: int,
        registrar: Registrar, available_bytes: Callable[[], int],
    ) -> None:  # fmt: skip
        self.num_ready = 0
        self.ended = ""
        self.spent = Spent()
        self._last_step = -LAUNCH_PASSES_S
        self._launched = threading.Event()
        self._launched.set()
        self._loads_end = 0.0
        self._slots_used = 0
        self._all, self._pitch, self._per_piece = num_slots, pitch, slots_per_piece
        self._wanted = num_slots
        self._mapping = mapping
        self._base = mapping.memory.data_ptr()
        self._registrar = registrar
        self._available = available_bytes
        self._registered: list[int] = []
        self._changed = threading.Condition()
        self._register_lock = threading.Lock()
        self._quiet_asked = 0  # by so many
        self._stopping = self._over = self._dropped = False
        self._thread = self._new_thread()

    def start(self) -> None:
        """Begin, on a thread of its own."""
        nbytes = self._in_pieces(self._wanted) * self._pitch
        self._mapping.keep(nbytes)
        self._mapping.toucher.start(nbytes)
        self._thread.start()

    def resize(self, num_slots: int) -> None:
        """Want so many slots, fewer than now or more, up to all; returns before more are there.

        Whole pieces are given back. No copy may be under way.

        Raises:
            TransferError: the driver does not return from registering a piece.
        """
        self.stop()
        with self._register_lock:
            while self._registered and (len(self._registered) - 1) * self._per_piece >= num_slots:
                self._registrar.unregister(self._registered.pop())
        self._wanted, self.ended = num_slots, ""
        self._slots_used = min(self._slots_used, num_slots)
        self.num_ready = min(self.num_registered, num_slots)
        # Of what is wanted nothing: where it is shared, another process may have registered more.
        self._mapping.give_back(self._in_pieces(num_slots) * self._pitch)
        if self.num_ready < num_slots:
            self._stopping = self._over = False
            self._thread = self._new_thread()
            self.start()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Nothing is registered meanwhile, and no other piece before it begins."""
        with self._changed:
            self._quiet_asked += 1
        try:
            with self._register_lock:
                yield
        finally:
            with self._changed:
                self._quiet_asked -= 1
                self._changed.notify_all()

    def step_begins(self, loads_s: float, last_slot: int) -> None:
        """A step is about to be launched, with loads of so many seconds, and stores to slots."""
        self._launched.clear()
        self._last_step = time.monotonic()
        self._slots_used = max(self._slots_used, last_slot + 1)
        if loads_s:
            self._loads_end = max(self._loads_end, self._last_step) + loads_s

    def step_ends(self) -> None:
        """All of it has been launched."""
        self._last_step = time.monotonic()
        self._launched.set()

    def wait(self, num_slots: int) -> None:
        """Return once that many slots are usable; NoSlots if they never will be."""
        self.wait_up_to(num_slots)
        if self.num_ready < num_slots:
            raise NoSlots(
                self.ended or f"expected {num_slots} CPU slots, found {self.num_ready} in all."
            )

    def wait_up_to(self, num_slots: int) -> None:
        """Return once that many slots are usable, or there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self.num_ready >= num_slots or self._over)

    def ask_to_stop(self) -> None:
        """Nothing is registered any more soon."""
        self._stopping = True
        self._mapping.toucher.ask_to_stop()

    def stop(self) -> None:
        """Return when nothing is registered any more.

        Raises:
            TransferError: the driver does not return.
        """
        self.ask_to_stop()
        self._mapping.toucher.stop()
        if self._thread is threading.current_thread():  # which may collect garbage
            return
        self._thread.join(EXIT_S)
        if self._thread.is_alive():
            raise TransferError(
                f"expected the driver to register a piece of CPU memory within {EXIT_S:.0f} s, "
                "found that it has not returned; restart the server."
            )

    def close(self) -> None:
        """Stop, and take back every registration; none while the driver does not return."""
        try:
            self.stop()
        except TransferError as error:
            _NOT_FREED.append(self._mapping.memory)
            logger.warning(
                "kvoffload_patch: CPU memory of the tier is not given back (%s); end the process "
                "to have it back.", error,
            )  # fmt: skip
            return
        if self._thread is threading.current_thread() and not self._over:
            self._dropped = True  # it may be at a piece, and takes that back as well when it ends
            return
        self._unregister_all()

    def _unregister_all(self) -> None:
        while self._registered:
            self._registrar.unregister(self._registered.pop())

    def _new_thread(self) -> JoinedThread:
        return JoinedThread(self._run, "kvoffload-register", self.ask_to_stop)

    @property
    def num_registered(self) -> int:
        """Slots that the driver knows: whole pieces, some of whose slots may not be wanted."""
        return min(len(self._registered) * self._per_piece, self._all)

    def _in_pieces(self, num_slots: int) -> int:
        """So many slots, rounded up to whole pieces, of which the last may have fewer."""
        return min(-(-num_slots // self._per_piece) * self._per_piece, self._all)

    def _run(self) -> None:
        why = ""
        try:
            why = self._register_all()
            self.ended = self._sentence(why) if why else ""
        except CannotRegister as error:
            self.ended = why = str(error)
        except Exception as error:  # noqa: BLE001 - said with the rest; nobody else sees it
            why = f"expected to register more CPU memory, found {error}"
            self.ended = self._sentence(why)
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()
            if self._dropped:
                self._unregister_all()
        if why and not self._stopping:
            # What cannot be registered is of no use to anybody here.
            self._mapping.keep(self.num_registered * self._pitch)

    def _register_all(self) -> str:
        """Register piece after piece; why not all, or nothing."""
        self._registrar.enter()
        why = ""
        while not why and not self._stopping and self.num_ready < self._wanted:
            why = self._next_piece()
        return why

    def _next_piece(self) -> str:
        """Register the next piece; why not, or nothing."""
        begin = self.num_registered
        end = min(begin + self._per_piece, self._all)
        asked = time.perf_counter()
        if not self._mapping.toucher.wait(end * self._pitch):
            return self._mapping.toucher.ended or "touching it was stopped"
        self.spent.touching += time.perf_counter() - asked
        address, nbytes = self._base + begin * self._pitch, (end - begin) * self._pitch
        self._let_pass()
        with self._changed:  # a lock alone would be this thread's again at once
            self._changed.wait_for(lambda: not self._quiet_asked)
        with self._register_lock:
            began = time.perf_counter()
            error = self._registrar.register(address, nbytes)
            took = time.perf_counter() - began
        self.spent.registering += took
        if error:
            return f"expected the driver to register {nbytes >> 20} MiB more, found error {error}"
        self._registered.append(address)
        with self._changed:
            self.num_ready = min(end, self._wanted)
            self._changed.notify_all()
        if time.monotonic() - self._last_step < LAUNCH_PASSES_S and not self._late:
            self._hold_back(took * PAUSE_TIMES)  # meanwhile the driver has time for the steps
        return ""

    def _let_pass(self) -> None:
        """Loads, unless stores have caught up, and the launch of a step."""
        began = time.perf_counter()
        loads_s = self._loads_end - time.monotonic()
        if loads_s > 0 and not self._late:
            time.sleep(min(loads_s, LOADS_PASS_S))
        self._launched.wait(LAUNCH_PASSES_S)
        self.spent.held_back += time.perf_counter() - began

    def _hold_back(self, seconds: float) -> None:
        began = time.perf_counter()
        time.sleep(seconds)
        self.spent.held_back += time.perf_counter() - began

    @property
    def _late(self) -> bool:
        """Whether stores have caught up."""
        return self._slots_used * GROWTH_PARTS > self.num_ready * (GROWTH_PARTS - 1)

    def _sentence(self, why: str) -> str:
        ready, total = (n * self._pitch / GIB for n in (self.num_ready, self._wanted))
        return (
            f"the CPU tier has {ready:.1f} of {total:.1f} GiB: {why} "
            f"({self._available() / GIB:.1f} GiB of memory available, ulimit -l "
            f"{_locked_limit()}); lower KVOFFLOAD_CPU_GIB, or raise what is short."
        )


def _locked_limit() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} kB"
