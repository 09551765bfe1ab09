"""Copies on the host for vLLM's own connectors: bytes both ways, and what is refused."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from scripts.bench.serve import child, host_copies, modes  # noqa: E402
from scripts.bench.serve import job as job_of  # noqa: E402
from scripts.bench.serve.sizes import SMALL  # noqa: E402

BLOCKS, SLOTS, BYTES = 6, 4, 16


def region(blocks: int) -> Any:
    """Bytes that differ from block to block and within one."""
    return (torch.arange(blocks * BYTES) % 127).to(torch.int8).view(blocks, BYTES)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """vLLM's modules with the copies of the benchmark; put back after the test."""
    vllm = pytest.importorskip("vllm")
    if vllm.__version__.partition("+")[0] != host_copies.RELEASE:
        pytest.skip(f"vLLM {vllm.__version__} is installed")
    simple, offloading = map(host_copies._module, (host_copies.SIMPLE, host_copies.OFFLOADING))
    for owner, name in (
        (simple, "torch"),
        (simple, "DmaCopyBackend"),
        (offloading, "CPUOffloadingWorker"),
        (offloading.CPUOffloadingSpec, "get_worker"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(host_copies, "_found", lambda: (vllm.__version__, "cpu"))
    host_copies.install()
    return simple, offloading


def metadata(**values: Any) -> Any:
    """What the scheduler side tells a worker of SimpleCPUOffloadConnector in a step."""
    names = ("store_gpu_blocks", "store_cpu_blocks", "load_gpu_blocks", "load_cpu_blocks")
    return SimpleNamespace(
        **{name: [] for name in names} | {"store_event": -1, "load_event": -1, **values}
    )


def test_simples_own_worker_stores_and_loads_bytes(installed: tuple[Any, Any]) -> None:
    gpu = region(2 * BLOCKS)  # two layers, one after the other
    stride = BLOCKS * BYTES
    config = SimpleNamespace(
        num_blocks=BLOCKS,
        kv_cache_tensors=[
            SimpleNamespace(layers=["a", "b"], block_stride=BYTES, layer_stride=stride, offset=0)
        ],
    )
    worker = installed[0].SimpleCPUOffloadWorker(None, config, SLOTS * 2 * BYTES)
    worker.register_kv_caches({"a": gpu[:BLOCKS], "b": gpu[BLOCKS:]})
    before = gpu.clone()

    worker.bind_connector_metadata(
        metadata(store_gpu_blocks=[4, 1], store_cpu_blocks=[0, 3], store_event=7)
    )
    worker.wait_for_save()
    assert worker.get_finished(set()) == (None, None)
    assert worker.build_connector_worker_meta().completed_store_events == {7: 1}
    assert torch.equal(gpu, before), "a store leaves the KV cache as it is"

    gpu.zero_()
    worker.bind_connector_metadata(
        metadata(
            load_cpu_blocks=[3, 0], load_gpu_blocks=[2, 5], load_event=0,
            load_event_to_reqs={0: ["a request"]},
        )
    )  # fmt: skip
    worker.start_load_kv()
    assert worker.get_finished(set()) == (None, {"a request"})
    for layer in (0, BLOCKS):
        assert torch.equal(gpu[layer + 2], before[layer + 1])
        assert torch.equal(gpu[layer + 5], before[layer + 4])
        assert not gpu[layer : layer + 2].any() and not gpu[layer + 3 : layer + 5].any()


def test_offloadings_spec_makes_a_worker_that_stores_and_loads_bytes(
    installed: tuple[Any, Any],
) -> None:
    from vllm.v1.kv_offload import base

    gpu = [region(BLOCKS), region(BLOCKS) + 1]
    before = [tensor.clone() for tensor in gpu]
    caches = base.CanonicalKVCaches(
        [base.CanonicalKVCacheTensor(tensor, BYTES) for tensor in gpu],
        # Two groups; of the second one's pages the last four bytes are not used.
        [[base.CanonicalKVCacheRef(0, BYTES)], [base.CanonicalKVCacheRef(1, BYTES - 4)]],
    )
    spec = object.__new__(installed[1].CPUOffloadingSpec)
    spec._worker, spec.num_chunks, spec.blocks_per_chunk = None, SLOTS, 1
    worker = spec.get_worker(caches)
    assert spec.get_worker(caches) is worker

    def on_gpu(*ids: int) -> Any:
        return base.GPULoadStoreSpec([*ids], (len(ids) - 1, 1), (0, 0))

    slots = base.BlockIDsLoadStoreSpec([3, 0, 2])
    assert worker.submit_store(5, on_gpu(4, 1, 2), slots)
    size = 3 * BYTES - 4
    assert worker.get_finished() == [base.TransferResult(5, True, size)]
    assert worker.get_finished() == []
    assert all(map(torch.equal, gpu, before)), "a store leaves the KV cache as it is"

    for tensor in gpu:
        tensor.zero_()
    assert worker.submit_load(6, slots, on_gpu(0, 5, 3))
    assert [result.job_id for result in worker.get_finished()] == [6]
    assert torch.equal(gpu[0][0], before[0][4]) and torch.equal(gpu[0][5], before[0][1])
    assert torch.equal(gpu[1][3][:-4], before[1][2][:-4])
    assert not gpu[0][1:5].any() and not gpu[1][:3].any() and not gpu[1][3][-4:].any()


def test_both_sides_have_as_many_blocks() -> None:
    with pytest.raises(host_copies.UnexpectedError, match="found 2 and 1"):
        host_copies.copy(region(BLOCKS), region(SLOTS), [1, 2], [1])


@pytest.mark.parametrize(
    "other", [{"blocks_per_chunk": 2}, {"mmap_region": 1}, {"canonical_layout": True}]
)
def test_other_chunks_and_layouts_are_refused(other: dict[str, Any]) -> None:
    caches = SimpleNamespace(tensors=[], group_data_refs=[])
    with pytest.raises(host_copies.UnexpectedError, match="chunks of one block"):
        host_copies.CPUOffloadingWorker(
            caches, **{"blocks_per_chunk": 1, "num_cpu_chunks": SLOTS, **other}
        )


def test_another_release_or_device_is_refused() -> None:
    host_copies.check("0.32.0+cpu", "cpu")
    for release, device in (("0.32.1+cpu", "cpu"), ("0.33.0", "cpu"), ("0.32.0", "cuda")):
        with pytest.raises(host_copies.UnexpectedError, match=re.escape(release)) as found:
            host_copies.check(release, device)
        assert str(found.value).endswith(f"found {release} on {device}")


def modules() -> dict[str, Any]:
    """vLLM's two modules, made up: all that is replaced has the names and parameters of 0.32.0."""

    class Backend(host_copies.DmaCopyBackend):
        init, launch_copy = host_copies.DmaCopyBackend.init, host_copies.DmaCopyBackend.launch_copy

    class Worker(host_copies.CPUOffloadingWorker):
        submit_load = host_copies.CPUOffloadingWorker.submit_load

    spec = type("CPUOffloadingSpec", (), {"get_worker": lambda self, kv_caches: None})
    simple = SimpleNamespace(__name__="simple", torch=torch, DmaCopyBackend=Backend)
    offloading = SimpleNamespace(
        __name__="offloading", CPUOffloadingSpec=spec, CPUOffloadingWorker=Worker
    )
    return {host_copies.SIMPLE: simple, host_copies.OFFLOADING: offloading}


def without(name: str, *of: str) -> Callable[[dict[str, Any]], None]:
    """Takes a name away from one of the modules, or from what that has."""

    def change(found: dict[str, Any]) -> None:
        owner = found[of[0]]
        for each in of[1:]:
            owner = getattr(owner, each)
        delattr(owner, name)

    return change


def other_parameters(found: dict[str, Any]) -> None:
    found[host_copies.SIMPLE].DmaCopyBackend.launch_copy = lambda self, blocks: None


def one_more(found: dict[str, Any]) -> None:
    found[host_copies.OFFLOADING].CPUOffloadingWorker.cancel = lambda self: None


def another_torch(found: dict[str, Any]) -> None:
    found[host_copies.SIMPLE].torch = SimpleNamespace()


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda found: found.pop(host_copies.SIMPLE), "expected vllm.v1.simple_kv_offload.worker"),
        (without("DmaCopyBackend", host_copies.SIMPLE), "expected DmaCopyBackend in simple"),
        (without("torch", host_copies.SIMPLE), "expected torch in simple"),
        (without("CPUOffloadingSpec", host_copies.OFFLOADING), "CPUOffloadingSpec in offloading"),
        (without("CPUOffloadingWorker", host_copies.OFFLOADING), "expected CPUOffloadingWorker"),
        (without("get_worker", host_copies.OFFLOADING, "CPUOffloadingSpec"), "expected get_worker"),
        (other_parameters, "'wait_event'], found \\['self', 'blocks'\\]"),
        (one_more, "expected cancel in CPUOffloadingWorker, found none"),
        (another_torch, "found another module"),
    ],
)
def test_what_is_not_as_expected_is_said_in_a_sentence_and_nothing_is_replaced(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    found = modules()
    change(found)

    def load(name: str) -> Any:
        if name not in found:
            raise ImportError(f"No module named {name!r}")
        return found[name]

    monkeypatch.setattr(host_copies.importlib, "import_module", load)
    monkeypatch.setattr(host_copies, "_found", lambda: ("0.32.0+cpu", "cpu"))
    before = [dict(vars(module)) for module in found.values()]
    with pytest.raises(host_copies.UnexpectedError, match=said):
        host_copies.install()
    assert [dict(vars(module)) for module in found.values()] == before


@pytest.mark.parametrize("small", [True, False])
def test_small_runs_of_the_connectors_alone_have_them(tmp_path: Path, small: bool) -> None:
    setup = job_of.Setup(tmp_path, SMALL, small, {}, tmp_path, 5.0)
    have = [
        mode
        for mode in (*modes.NAMES, "ours+KVOFFLOAD_STORE=lazy")
        if job_of.spec_of(job_of.Job(mode, "main", [], 1), setup, tmp_path)["host_copies"]
    ]
    assert have == (["simple", "offloading"] if small else [])


def test_a_job_that_cannot_have_them_ends_with_that_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, events = tmp_path / "spec", tmp_path / "events"
    spec.write_text(json.dumps({"out": str(events), "host_copies": True}))
    monkeypatch.setattr(sys, "argv", ["child", str(spec)])
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=None))
    monkeypatch.setattr(host_copies, "_found", lambda: ("0.33.0", "cpu"))
    with pytest.raises(host_copies.UnexpectedError):
        child.main()
    (event,) = map(json.loads, events.read_text().splitlines())
    assert event["event"] == "failed" and event["scenario"] == "start"
    assert event["error"].endswith("vLLM 0.32.0 on the CPU alone, found 0.33.0 on cpu")
