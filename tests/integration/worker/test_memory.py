"""CPU memory taken while the model loads: when, how much, and what becomes of it."""

from __future__ import annotations

import gc
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from transfer.registrars import Registrar  # noqa: E402
from transfer.resident import is_mapped, kvoffload_threads  # noqa: E402

from kvoffload_patch.integration.protocol import TIER  # noqa: E402
from kvoffload_patch.integration.worker import hooks as worker_hooks  # noqa: E402
from kvoffload_patch.integration.worker import memory as host_memory  # noqa: E402
from kvoffload_patch.integration.worker.memory import (  # noqa: E402
    EARLY,
    begin_early,
    drop_early,
    early_bytes,
    open_host,
)
from kvoffload_patch.memory import Room  # noqa: E402
from kvoffload_patch.transfer.devices import cuda as devices  # noqa: E402
from kvoffload_patch.transfer.memory import mapping  # noqa: E402

MIB = 1 << 20
COMPILE = host_memory._compile_kernels


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("KVOFFLOAD_CPU_GIB", str(96 / 1024))
    monkeypatch.setattr(mapping, "TOUCH_BYTES", MIB)
    monkeypatch.setattr(mapping, "RESERVE_BYTES", 0)
    properties = SimpleNamespace(is_integrated=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(host_memory, "_compile_kernels", lambda *_: None)
    yield properties
    gc.collect()
    assert kvoffload_threads() == []


def runner(device: str = "cuda:0", caching: bool = True, mla: bool = False, **parallel: Any) -> Any:
    return SimpleNamespace(
        device=torch.device(device),
        vllm_config=SimpleNamespace(
            cache_config=SimpleNamespace(enable_prefix_caching=caching),
            parallel_config=SimpleNamespace(**parallel),
            model_config=SimpleNamespace(use_mla=mla),
        ),
    )


@pytest.mark.parametrize(
    ("parallel", "mib"),
    [({}, 96), ({"world_size": 2}, 48), ({"world_size": 4, "data_parallel_size": 3}, 8)],
)
def test_a_rank_takes_its_share_while_the_model_loads(parallel: dict[str, int], mib: int) -> None:
    one = runner(**parallel)
    begin_early(one)
    early = getattr(one, EARLY)
    assert early.toucher.wait(mib * MIB)
    assert early_bytes(one) == mib * MIB, "more was touched than the share"
    assert early.nbytes > mib * MIB, "ranks may be a little unlike"
    address = early.memory.data_ptr()
    del early
    drop_early(one)
    gc.collect()
    assert not hasattr(one, EARLY) and early_bytes(one) == 0
    assert not is_mapped(address)
    drop_early(one)


def test_the_end_of_loading_waits_for_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []

    def compile_slowly(device: Any, integrity: str) -> None:
        time.sleep(0.2)
        compiled.append(device)

    monkeypatch.setattr(host_memory, "_compile_kernels", compile_slowly)
    one = runner()
    compiling = begin_early(one)
    assert compiling is not None and compiled == []
    compiling.join()
    assert compiled == [one.device]
    drop_early(one)


def test_a_kernel_that_cannot_be_compiled_yet_is_nobodys_trouble() -> None:
    COMPILE(torch.device("meta"), "full")  # which CUDA does not know


def test_no_kernel_is_compiled_for_a_device_without_use_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[Any] = []
    # Not imported with this file: kernels are interpreted in tests of transfer/, which come later.
    warm_up = "kvoffload_patch.transfer.backends.tiles.warm_up"
    monkeypatch.setattr(warm_up, lambda device, every: compiled.append(device.type))
    for device in ("xpu", "cuda"):
        monkeypatch.setattr(getattr(torch, device), "set_device", lambda device: None)
        monkeypatch.setattr(getattr(torch, device), "synchronize", lambda device: None)
        COMPILE(torch.device(device), "off")
    assert compiled == ["cuda"]


@pytest.mark.parametrize("changes", [{"device": "cpu"}, {"caching": False}])
def test_without_a_gpu_or_a_prefix_cache_nothing_is_taken(changes: dict[str, Any]) -> None:
    one = runner(**changes)
    begin_early(one)
    assert not hasattr(one, EARLY)


def test_memory_that_is_the_gpus_too_is_left_alone_meanwhile(settings: Any) -> None:
    settings.is_integrated = 1
    one = runner()
    begin_early(one)
    assert not hasattr(one, EARLY)


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(1, 1, 2), (8, 1, 4), (16, 1, 8), (64, 1, 8), (16, 4, 2)]
)
def test_half_of_the_cores_touch_memory(
    cores: int, ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapping.os, "sched_getaffinity", lambda _: set(range(cores)))
    one = runner(world_size=ranks)
    begin_early(one)
    assert getattr(one, EARLY).toucher._num_threads == threads
    drop_early(one)


def test_a_rank_leaves_what_the_others_may_be_taking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "MEMORY_PATIENCE_S", 0.05)
    monkeypatch.setattr(host_memory, "available", lambda: Room((512 + 107) * MIB))
    for ranks, share in ((1, 96), (2, 48)):
        one = runner(world_size=ranks)
        begin_early(one)
        assert getattr(one, EARLY).toucher.wait(share * MIB)
        drop_early(one)
    monkeypatch.setattr(host_memory, "available", lambda: Room((512 + 40) * MIB))
    begin_early(one)
    assert not getattr(one, EARLY).toucher.wait(48 * MIB)
    drop_early(one)


def test_an_automatic_share_is_taken_early_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVOFFLOAD_CPU_GIB", "auto")
    room = Room((1024 + 96) * MIB)
    monkeypatch.setattr(host_memory, "shareable", lambda: room)
    for parallel, mib in (({}, 96), ({"world_size": 2}, 48), ({"data_parallel_size": 4}, 24)):
        assert host_memory._share_bytes(runner(**parallel)) == mib * MIB


def test_what_can_never_fit_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "attainable", lambda: Room(95 * MIB))
    one = runner()
    begin_early(one)
    assert not hasattr(one, EARLY)


def test_a_second_loading_takes_nothing_more() -> None:
    one = runner()
    begin_early(one)
    early = getattr(one, EARLY)
    begin_early(one)
    assert getattr(one, EARLY) is early
    drop_early(one)
    setattr(one, TIER, object())
    begin_early(one)
    assert not hasattr(one, EARLY)


@pytest.mark.parametrize("breaks", ["runner", "settings", "mapping"])
def test_loading_goes_on_whatever_fails(breaks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = SimpleNamespace() if breaks == "runner" else runner()
    if breaks == "settings":
        monkeypatch.setenv("KVOFFLOAD_CPU_GIB", "much")
    if breaks == "mapping":
        monkeypatch.setattr(mapping.mmap, "mmap", lambda *_, **__: 1 / 0)
    given = worker_hooks.load_model(lambda *a, **k: (a, k), one, (True,), {"model": 7})
    assert given == ((True,), {"model": 7})
    assert not hasattr(one, EARLY)


def test_memory_is_taken_beside_the_loading_and_not_after_it() -> None:
    one = runner()
    worker_hooks.load_model(lambda: getattr(one, EARLY).toucher.wait(96 * MIB), one, (), {})
    assert early_bytes(one) == 96 * MIB
    drop_early(one)


@pytest.fixture
def registrar(monkeypatch: pytest.MonkeyPatch) -> Registrar:
    one = Registrar()
    monkeypatch.setattr(devices, "CudaRegistrar", lambda index: one)
    return one


def layout(device: str = "cuda:0") -> Any:
    return SimpleNamespace(block_bytes=MIB, device=torch.device(device))


def test_the_slots_lie_in_the_memory_taken_early(registrar: Registrar) -> None:
    one = runner()
    begin_early(one)
    address = getattr(one, EARLY).memory.data_ptr()
    host = open_host(one, 96, layout())
    assert not hasattr(one, EARLY)
    assert host.slots.data_ptr() == address
    host.wait_ready(96)
    host.close()
    assert registrar.held == {}


def test_a_rank_without_early_memory_takes_it_then(registrar: Registrar) -> None:
    host = open_host(runner(), 96, layout())
    host.wait_ready(96)
    assert sum(n for _, n in registrar.asked) == 96 * MIB
    host.close()
    cpu = open_host(runner("cpu"), 96, layout("cpu"))
    assert cpu.num_ready == 96
    cpu.close()


def test_growth_looks_at_the_memory_available(
    registrar: Registrar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapping, "MEMORY_PATIENCE_S", 0.05)
    monkeypatch.setattr(host_memory, "available", lambda: Room(0))
    with pytest.raises(RuntimeError, match="of memory available to go on, found 0.0"):
        open_host(runner(), 96, layout())


@pytest.mark.parametrize(("limit", "said"), [(8 * MIB, True), (sys.maxsize, False)])
def test_a_low_limit_on_locked_memory_is_raised_and_said(
    limit: int, said: bool, registrar: Registrar, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[int] = []
    lines: list[str] = []
    monkeypatch.setattr(host_memory.logger, "info", lambda text, *a: lines.append(text % a))
    monkeypatch.setattr(host_memory, "raise_locked_memory_limit", lambda: raised.append(1))
    monkeypatch.setattr(host_memory, "locked_memory_limit_bytes", lambda: limit)
    open_host(runner(), 96, layout()).close()
    assert raised == [1]
    assert ["ulimit -l is 8192 kB" in line for line in lines] == [True] * said


@pytest.mark.parametrize(("mla", "ranks", "taken"), [(True, 2, False), (True, 1, True)])
def test_ranks_that_will_map_their_slots_together_take_none_alone(
    mla: bool, ranks: int, taken: bool
) -> None:
    one = runner(mla=mla, world_size=ranks)
    begin_early(one)
    assert hasattr(one, EARLY) == taken
    drop_early(one)
