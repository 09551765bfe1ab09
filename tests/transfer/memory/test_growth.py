"""How slots become usable while vLLM runs: piece after piece, beside steps and loads."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from transfer.registrars import Registrar, grown
from transfer.resident import is_mapped, kvoffload_threads, resident_bytes

from kvoffload_patch.transfer.errors import CannotRegister, NoSlots, TransferError
from kvoffload_patch.transfer.memory import growth, mapping
from kvoffload_patch.transfer.memory.host_buffer import HostBuffer

CPU = torch.device("cpu")
MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("small_steps", "no_thread_is_left")


def test_so_many_are_waited_for_or_all_that_there_will_be() -> None:
    host = grown(24, 2 * MIB, Registrar())
    assert host.wait_up_to(5) >= 6 and host.wait_up_to(99) == 24
    host.close()
    short = grown(24, 2 * MIB, Registrar(refuse_at=3))
    assert short.wait_up_to(20) == 6 and short.wait_up_to(0) == 6
    short.close()
    assert HostBuffer(7, MIB, CPU).wait_up_to(99) == 7


@pytest.mark.parametrize("last_slot", [-1, 2, 3])
@pytest.mark.parametrize("beside_steps", [False, True])
def test_registering_leaves_the_driver_to_steps(
    beside_steps: bool, last_slot: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless stores have come near the end of what is usable: 4 slots at the first pause."""
    pauses: list[float] = []
    now, go = [1000.0], threading.Event()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(growth, "time", clock)
    touched = mapping.Toucher.wait

    def comes_late(toucher: mapping.Toucher, nbytes: int) -> bool:
        now[0] += 0.5
        return touched(toucher, nbytes)

    monkeypatch.setattr(mapping.Toucher, "wait", comes_late)

    def takes_two_seconds(index: int) -> None:
        now[0] += 2.0
        if index == 1:
            go.wait(20)
            if beside_steps:
                host.step_begins(last_slot=last_slot)  # the next call ends long after it

    host = grown(8, 2 * MIB, Registrar(before=takes_two_seconds))
    go.set()
    host.wait_ready(8)
    host._growth._thread.join(20)  # type: ignore[union-attr]
    beside = beside_steps and last_slot < 3
    assert pauses == [2.0 * growth.PAUSE_TIMES] * beside, "the next calls end long after the step"
    held_back = 2.0 * growth.PAUSE_TIMES * beside
    assert host.growth_spent == (
        f"2.0 s waiting for pages, 8.0 s registering, {held_back} s held back"
    )
    host.close()


def test_a_tier_that_was_full_and_then_smaller_leaves_the_driver_to_steps_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No store is near the end of what is usable any more."""
    pauses: list[float] = []
    clock = SimpleNamespace(
        monotonic=lambda: 0.0, perf_counter=time.perf_counter, sleep=pauses.append
    )
    registrar = Registrar()
    host = grown(8, 2 * MIB, registrar)
    host.wait_ready(8)
    host.step_begins(last_slot=7)
    host.resize(2)
    registrar.before = lambda _: host.step_begins(last_slot=1)
    monkeypatch.setattr(growth, "time", clock)
    host.resize(8)
    host.wait_ready(8)
    host._growth._thread.join(20)  # type: ignore[union-attr]
    assert len(pauses) == 3, "one for each piece"
    host.close()


@pytest.mark.parametrize("ends", [True, False])
def test_the_launch_of_a_step_passes_before_the_next_piece_is_registered(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where stores have caught up; but not for ever: its end may be lost."""
    monkeypatch.setattr(growth, "LAUNCH_PASSES_S", 20.0 if ends else 0.05)
    within, begun, launched = threading.Event(), threading.Event(), threading.Event()
    waits = threading.Event()
    seen = [0]

    class Launched(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.set()
            return super().wait(timeout)

    def before(index: int) -> None:
        if index == 1:
            within.set()
            begun.wait(20)
        if index == 2:
            seen[0] = launched.is_set()

    host = grown(8, 2 * MIB, Registrar(before=before))
    assert within.wait(20), "this piece is not to wait"
    found = host._growth
    assert found is not None
    found._launched = Launched()
    found._launched.set()  # as a step leaves it
    host.step_begins(last_slot=7)
    begun.set()
    host.wait_ready(4)
    if ends:
        assert waits.wait(20)
        time.sleep(0.05)
        launched.set()
        host.step_ends()
    host.wait_ready(8)
    assert seen[0] == ends
    assert 0.04 < found.spent.held_back < 10
    host.close()


def test_who_waits_for_quiet_comes_before_the_next_piece() -> None:
    """Pieces are registered without a pause: the lock would be taken again before they wake."""
    begun, go = threading.Event(), threading.Event()

    class LateLock:
        """One that others than the thread that registers ask for late."""

        def __init__(self, lock: threading.Lock) -> None:
            self.lock = lock

        def __enter__(self) -> None:
            if threading.current_thread().name != "kvoffload-register":
                time.sleep(0.05)
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    def before(index: int) -> None:
        if index == 1:
            begun.set()
            go.wait(20)

    registrar = Registrar(before=before)
    host = grown(8, 2 * MIB, registrar)
    found = host._growth
    assert found is not None and begun.wait(20)
    with ThreadPoolExecutor(1) as pool:

        def ask() -> list[int]:
            found._register_lock = LateLock(found._register_lock)  # type: ignore[assignment]
            with host.quiet():
                first = host.num_ready
                time.sleep(0.05)
                return [first, host.num_ready]

        asked = pool.submit(ask)
        while not found._quiet_asked:
            time.sleep(0.001)
        go.set()
        assert asked.result(20) == [4, 4], "two pieces of two slots"
    host.wait_ready(8)
    host.close()


def test_quiet_waits_for_the_piece_that_the_driver_is_at() -> None:
    """Or what is timed within it would have waited for the driver."""
    registrar, reached, go = held_up(1)
    host = grown(8, 2 * MIB, registrar)
    assert reached.wait(20)
    begun = threading.Event()

    def ask() -> None:
        with host.quiet():
            begun.set()

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        try:
            assert not begun.wait(0.1)
        finally:
            go.set()
        asked.result(20)
    host.wait_ready(8)
    host.close()


@pytest.mark.parametrize("last_slot", [-1, 7])
def test_loads_pass_before_the_next_piece_is_registered(
    last_slot: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    now, go = [1000.0], threading.Event()

    def sleep(seconds: float) -> None:
        pauses.append(round(seconds, 4))
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(growth, "time", clock)

    def loads_come(index: int) -> None:
        if index == 1:
            go.wait(20)
            for _ in range(3):
                host.step_begins(0.010, last_slot)  # one behind the other

    host = grown(8, 2 * MIB, Registrar(before=loads_come))
    go.set()
    host.wait_ready(8)
    host._growth._thread.join(20)  # type: ignore[union-attr]
    # Two pieces remain, and neither waits for longer than so long; the calls took no time here.
    expected = [growth.LOADS_PASS_S, 0.005] if last_slot < 0 else []
    assert [pause for pause in pauses if pause] == expected, "unless stores have caught up"
    assert host._growth.spent.held_back == pytest.approx(sum(pauses))  # type: ignore[union-attr]
    host.close()


def test_the_constructor_waits_for_the_first_piece_and_for_no_more() -> None:
    go = threading.Event()
    registrar = Registrar(before=lambda i: i == 0 or go.wait(20))
    host = grown(24, 2 * MIB, registrar)
    assert host.num_ready == 2
    waiter = threading.Thread(target=host.wait_ready, args=(5,))
    waiter.start()
    waiter.join(0.1)
    assert waiter.is_alive(), "did not wait"
    go.set()
    waiter.join(20)
    assert not waiter.is_alive()
    assert host.num_ready >= 6
    host.wait_ready(24)
    assert host.num_ready == 24
    with pytest.raises(NoSlots, match="expected 25 CPU slots, found 24"):
        host.wait_ready(25)
    host.close()


def test_pages_are_there_before_they_are_registered() -> None:
    size, before = 128 * MIB, resident_bytes()
    seen: list[int] = []
    registrar = Registrar(before=lambda i: seen.append(resident_bytes() - before))
    host = grown(64, 2 * MIB, registrar, piece_bytes=32 * MIB)
    host.wait_ready(64)
    assert len(seen) == 4
    assert all(there > 0.9 * (i + 1) * size / 4 for i, there in enumerate(seen))
    host.close()


def test_a_piece_that_is_refused_ends_the_growth_and_leaves_what_is_ready() -> None:
    before = resident_bytes()

    def after_touching_all(index: int) -> None:
        deadline = time.monotonic() + 60
        while index == 3 and resident_bytes() - before < 180 * MIB and time.monotonic() < deadline:
            time.sleep(0.01)

    registrar = Registrar(refuse_at=3, before=after_touching_all)
    host = grown(100, 2 * MIB, registrar)
    with pytest.raises(NoSlots) as caught:
        host.wait_ready(7)
    host._growth._thread.join(20)  # type: ignore[union-attr]
    assert host.num_ready == 6
    assert len(registrar.asked) == 4, "went on after a refusal"
    text = host.growth_ended
    assert str(caught.value) == text and "\n" not in text
    assert "has 0.0 of 0.2 GiB: expected the driver to register 4 MiB more, found error 2" in text
    assert "ulimit -l" in text and "lower KVOFFLOAD_CPU_GIB" in text
    assert resident_bytes() - before < 100 * MIB, "kept memory that nobody can use"
    host.wait_ready(6)
    host.slots[:6].fill_(9)
    host.close()
    assert registrar.held == {}


def test_a_driver_that_registers_nothing_is_an_error_that_blames_no_size() -> None:
    def refuse(index: int) -> None:
        raise CannotRegister("expected a driver that registers, found one that does not")

    with pytest.raises(NoSlots, match="^expected a driver that registers, found one that does n"):
        grown(24, 2 * MIB, Registrar(before=refuse))


@pytest.mark.parametrize("limit, said", [(8 << 20, "8192 kB"), (-1, "unlimited")])
def test_a_refusal_of_the_first_piece_is_an_error_and_leaves_nothing(
    limit: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth.resource, "getrlimit", lambda _: (limit, limit))
    registrar = Registrar(refuse_at=0)
    text = rf"MiB more, found error 2 .* ulimit -l {said}\); lower KVOFF"
    with pytest.raises(TransferError, match=text) as caught:
        grown(8, 2 * MIB, registrar)
    assert not is_mapped(registrar.asked[0][0]), "kept by the traceback"
    assert "\n" not in str(caught.value)


def test_a_driver_that_raises_ends_the_growth() -> None:
    def fail(index: int) -> None:
        if index == 1:
            raise RuntimeError("no context")

    host = grown(8, 2 * MIB, Registrar(before=fail))
    with pytest.raises(TransferError, match="expected to register more CPU memory, found no cont"):
        host.wait_ready(8)
    assert host.num_ready == 2
    host.close()


def test_growth_ends_when_memory_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "MEMORY_PATIENCE_S", 0.2)
    looks = iter([64 * MIB] * 4)
    registrar = Registrar()
    host = grown(64, 2 * MIB, registrar, available_bytes=lambda: next(looks, 3 * MIB))
    with pytest.raises(TransferError, match=r"expected 0\.0 GiB of memory available to go on"):
        host.wait_ready(64)
    assert 2 <= host.num_ready < 64
    assert len(registrar.asked) == host.num_ready // 2
    host.close()


def test_memory_that_comes_later_is_waited_for() -> None:
    looks, more = iter(range(4)), threading.Event()

    def available() -> int:
        return 64 * MIB if next(looks, None) is not None or more.is_set() else 0

    host = grown(64, 2 * MIB, Registrar(), available_bytes=available)
    host._growth._thread.join(0.3)  # type: ignore[union-attr]
    assert host.num_ready < 64 and not host.growth_ended
    more.set()
    host.wait_ready(64)
    host.close()


def test_closed_while_it_grows_it_registers_no_more_and_unregisters_all() -> None:
    begun, go = threading.Event(), threading.Event()

    def hold(index: int) -> None:
        if index == 2:
            begun.set()
            go.wait(20)

    registrar = Registrar(before=hold)
    host = grown(64, 2 * MIB, registrar)
    address = host.slots.data_ptr()
    assert begun.wait(20)
    closer = threading.Thread(target=host.close)
    closer.start()
    closer.join(0.1)
    assert closer.is_alive(), "the driver is in the middle of a piece"
    go.set()
    closer.join(20)
    assert not closer.is_alive()
    assert len(registrar.asked) == 3
    assert registrar.held == {}
    gc.collect()
    assert not is_mapped(address)


def test_a_waiter_is_told_of_the_end() -> None:
    go = threading.Event()
    host = grown(8, 2 * MIB, Registrar(before=lambda i: i == 0 or go.wait(20)))
    told: list[str] = []

    def wait() -> None:
        with pytest.raises(TransferError) as caught:
            host.wait_ready(8)
        told.append(str(caught.value))

    waiter = threading.Thread(target=wait)
    waiter.start()
    closer = threading.Thread(target=host.close)
    closer.start()
    closer.join(0.1)
    go.set()
    closer.join(20)
    waiter.join(20)
    assert len(told) == 1


def test_fewer_slots_give_whole_pieces_back_and_more_are_registered_again() -> None:
    registrar, before = Registrar(), resident_bytes()
    host = grown(24, 2 * MIB, registrar)  # two slots in each piece
    host.wait_ready(24)
    host.slots[:] = 1
    host.resize(5)
    assert (host.num_ready, host.growing, len(registrar.held)) == (5, False, 3)
    assert host.slots[:6].all() and not host.slots[6:].any()
    with pytest.raises(TransferError, match="found 5 in all"):
        host.wait_ready(6)
    host.resize(9)
    assert host.wait_up_to(9) == 9 and len(registrar.held) == 5
    while kvoffload_threads():
        time.sleep(0.001)
    assert resident_bytes() - before < 24 * MIB, "took more than is wanted"
    host.resize(24)
    host.wait_ready(24)
    assert len(registrar.held) == 12 and len(registrar.asked) == 12 + 2 + 7
    host.close()
    assert not registrar.held


def held_up(at: int) -> tuple[Registrar, threading.Event, threading.Event]:
    """A registrar that waits at this piece, an event that tells of it, and one that lets it go."""
    reached, go = threading.Event(), threading.Event()

    def wait(index: int) -> None:
        if index == at:
            reached.set()
            go.wait(60)

    return Registrar(before=wait), reached, go


def test_a_size_may_change_while_slots_are_still_coming() -> None:
    registrar, reached, go = held_up(2)
    host = grown(24, 2 * MIB, registrar)
    reached.wait(20)
    threading.Timer(0.05, go.set).start()
    host.resize(3)
    assert (host.num_ready, host.growing) == (3, False)
    host.resize(8)
    assert host.wait_up_to(99) == 8 and not host.growing and not host.growth_ended
    host.close()
    assert not registrar.held


def test_growing_again_may_end_as_at_first() -> None:
    registrar = Registrar(refuse_at=13)
    host = grown(24, 2 * MIB, registrar)
    host.wait_ready(24)
    host.resize(4)
    host.resize(24)
    assert host.wait_up_to(24) == 6 and "error 2" in host.growth_ended and not host.growing
    host.close()
    assert not registrar.held


def odd(registrar: Registrar) -> HostBuffer:
    """Slots whose pieces do not end where the steps of touching do: 21 in 4,032 KiB."""
    host = grown(120, 192 << 10, registrar)
    host.wait_ready(120)
    host.slots[:] = 1
    return host


@pytest.mark.parametrize("fewer", [21, 30, 42])
def test_slots_that_stay_are_not_touched_again(fewer: int) -> None:
    host = odd(Registrar())
    host.resize(fewer)
    host.resize(120)
    host.wait_ready(120)
    assert host.slots[:fewer].all()
    host.resize(fewer + 30)
    host.slots[: fewer + 30] = 1
    host.resize(fewer + 10)
    host.resize(120)
    host.wait_ready(120)
    assert host.slots[: fewer + 10].all()
    host.close()


def test_a_size_that_changes_while_it_grows_leaves_what_is_stored() -> None:
    registrar, reached, go = held_up(2)
    host = grown(120, 192 << 10, registrar)
    reached.wait(20)
    host.slots[:42] = 1
    threading.Timer(0.05, go.set).start()
    host.resize(100)
    host.wait_ready(100)
    assert host.slots[:42].all()
    host.close()


def test_slots_behind_those_that_are_wanted_are_wiped_as_well() -> None:
    host = odd(Registrar())
    host.resize(30)
    assert host.slots[30:42].all(), "their piece stays"
    host.wipe()
    assert not host.slots[:42].any()
    host.close()


def test_what_the_registering_thread_itself_drops_is_not_left_registered() -> None:
    """It may collect garbage at any time, also in the middle of a piece."""
    dropped: list[HostBuffer] = []
    waiting, dropping = threading.Event(), threading.Event()

    def drop(index: int) -> None:
        if index == 2:
            waiting.wait(20)
            dropped.clear()
            dropping.set()

    registrar = Registrar(before=drop)
    dropped.append(grown(24, 2 * MIB, registrar))
    thread = dropped[0]._growth._thread  # type: ignore[union-attr]
    address = dropped[0].slots.data_ptr()
    waiting.set()
    thread.join(20)
    assert dropping.is_set() and len(registrar.asked) == 3
    gc.collect()
    assert not registrar.held and not is_mapped(address)


def test_what_that_thread_drops_when_it_is_over_is_not_left_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dropped: list[HostBuffer] = []
    waiting = threading.Event()
    keep = mapping.HostMapping.keep

    def drop(found: mapping.HostMapping, nbytes: int) -> None:
        if threading.current_thread() is thread:
            dropped.clear()
        keep(found, nbytes)

    registrar = Registrar(
        before=lambda _: waiting.wait(20) if registrar.held else None, refuse_at=2
    )
    dropped.append(grown(24, 2 * MIB, registrar))
    thread = dropped[0]._growth._thread  # type: ignore[union-attr]
    monkeypatch.setattr(mapping.HostMapping, "keep", drop)
    waiting.set()
    thread.join(20)
    assert not dropped and not registrar.held


def test_a_driver_that_does_not_return_is_not_waited_for_where_a_stop_is_asked_for() -> None:
    registrar, reached, go = held_up(1)
    host = grown(120, 192 << 10, registrar)
    reached.wait(20)
    asking = threading.Thread(target=host._growth._thread.request_stop)  # type: ignore[union-attr]
    asking.start()
    asking.join(10)
    assert not asking.is_alive() and host._growth._thread.is_alive()  # type: ignore[union-attr]
    go.set()
    host.close()


def test_a_driver_that_does_not_return_fails_a_change_of_size(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And nobody waits for it for ever: not who asks for the change, nor who gives up the tier."""
    monkeypatch.setattr(growth, "EXIT_S", 0.05)
    monkeypatch.setattr(growth, "_NOT_FREED", [])
    registrar, reached, go = held_up(2)
    host = grown(24, 2 * MIB, registrar)
    thread, address = host._growth._thread, host.slots.data_ptr()  # type: ignore[union-attr]
    assert reached.wait(60)
    with ThreadPoolExecutor(1) as asking:
        try:
            for num_slots in (3, 24):
                with pytest.raises(TransferError, match=r"within 0 s, found that it has not ret"):
                    asking.submit(host.resize, num_slots).result(20)
            asking.submit(host.close).result(20)
            assert "is not given back (expected the driver to register" in caplog.text
            assert len(registrar.held) == 2
        finally:
            go.set()
    thread.join(60)
    del host
    gc.collect()
    assert is_mapped(address) and not thread.is_alive() and len(registrar.held) == 3


def test_where_no_thread_can_be_started_all_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    registrar = Registrar()
    host = odd(registrar)
    host.resize(21)

    def no_more(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_more)
    with pytest.raises(RuntimeError, match="new thread"):
        host.resize(120)
    with pytest.raises(RuntimeError, match="new thread"):
        grown(4, MIB, Registrar())
    monkeypatch.undo()
    host.close()
    assert not registrar.held
