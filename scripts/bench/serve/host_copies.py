"""Copies on the host for vLLM's own connectors to CPU memory, where vLLM is built for the CPU.

SimpleCPUOffloadConnector and OffloadingConnector copy with CUDA, so neither starts on that build.
`install` replaces what of them needs CUDA, in the benchmark's child process and in vLLM 0.32.0
alone. What is the benchmark's own then is all in this file, and all of it is of their worker side:

- SimpleCPUOffloadConnector: its copy backend; the streams and events that its worker asks torch for
- OffloadingConnector: its worker that copies both ways, and the step that makes it, which vLLM
  refuses without a GPU

A copy is plain torch and done when its call returns, as this tier's are on the CPU. So how long
copies take says nothing of the connectors. All else is vLLM's own, unchanged: both scheduler sides,
which decide what is stored, loaded, evicted and computed again, what they tell the workers and are
told, how the KV cache is laid out as blocks, and when the workers are asked to copy.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch

RELEASE = "0.32.0"
SIMPLE = "vllm.v1.simple_kv_offload.worker"
OFFLOADING = "vllm.v1.kv_offload.cpu.spec"
Rows = torch.Tensor  # (blocks, bytes of a block), int8


class UnexpectedError(RuntimeError):
    """Something is not as in the vLLM that this was written for."""


def copy(source: Rows, target: Rows, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
    """Copy blocks by number, the first to the first; done when this returns."""
    if len(source_ids) != len(target_ids):
        found = f"{len(source_ids)} and {len(target_ids)}"
        raise UnexpectedError(f"host copies: expected as many blocks on both sides, found {found}")
    target[torch.as_tensor(target_ids)] = source[torch.as_tensor(source_ids)]


class Event:
    """In place of `torch.Event`: what came before it is done."""

    def record(self, stream: Any = None) -> None:
        """Nothing is under way."""

    def query(self) -> bool:
        """Whether it is done."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


class Stream:
    """In place of `torch.cuda.Stream`."""

    def __init__(self, priority: int = 0) -> None:
        """There is one order, that of calls."""

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Least and greatest."""
        return 0, 0


class Cuda:
    """In place of `torch.cuda`, of which nothing else is there."""

    Stream = Stream

    @staticmethod
    def current_stream() -> Stream:
        """What events are recorded on."""
        return Stream()


class Torch:
    """`torch` as a module of vLLM sees it: the real one, but for streams and events."""

    cuda = Cuda
    Event = Event

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class DmaCopyBackend:
    """In place of SimpleCPUOffloadConnector's backend of that name."""

    def __init__(self) -> None:
        self._gpu: list[Rows] = []
        self._cpu: list[Rows] = []

    def init(
        self,
        gpu_caches: dict[str, Rows],
        cpu_caches: dict[str, Rows],
        device: torch.device,
        load_stream: Stream,
        store_stream: Stream,
    ) -> None:
        """Take the regions of both sides, which have the same names."""
        self._gpu = list(gpu_caches.values())
        self._cpu = [cpu_caches[name] for name in gpu_caches]

    def launch_copy(
        self,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, Event]],
        wait_event: Event | None = None,
    ) -> None:
        """Copy, and note it as done."""
        sides = (self._gpu, self._cpu) if is_store else (self._cpu, self._gpu)
        for source, target in zip(*sides):
            copy(source, target, src_blocks, dst_blocks)
        events_list.append((event_idx, Event()))

    def shutdown(self) -> None:
        """Nothing runs."""


class CPUOffloadingWorker:
    """In place of OffloadingConnector's worker of that name."""

    def __init__(
        self,
        kv_caches: Any,
        blocks_per_chunk: int,
        num_cpu_chunks: int,
        mmap_region: Any = None,
        canonical_layout: bool = False,
    ) -> None:
        if blocks_per_chunk != 1 or mmap_region is not None or canonical_layout:
            raise UnexpectedError(
                "host copies: expected OffloadingConnector with chunks of one block in memory of"
                f" its own, found {blocks_per_chunk} blocks a chunk, shared memory:"
                f" {mmap_region is not None}, canonical layout: {canonical_layout}"
            )
        self._gpu = [each.tensor.view(torch.int8) for each in kv_caches.tensors]
        self._cpu = [
            torch.zeros((num_cpu_chunks, each.page_size_bytes), dtype=torch.int8)
            for each in kv_caches.tensors
        ]
        self._groups = kv_caches.group_data_refs
        self._done: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy out of the KV cache."""
        return self._submit(job_id, (self._gpu, src_spec), (self._cpu, dst_spec), src_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy into the KV cache."""
        return self._submit(job_id, (self._cpu, src_spec), (self._gpu, dst_spec), dst_spec)

    def _submit(
        self, job_id: int, source: tuple[list[Rows], Any], target: tuple[list[Rows], Any], gpu: Any
    ) -> bool:
        from vllm.v1.kv_offload.base import TransferResult

        (sources, from_), (targets, to), size, first = source, target, 0, 0
        for refs, blocks in zip(self._groups, gpu.group_sizes):
            ids = slice(first, first + blocks)
            first += blocks
            for ref in refs:
                number, page = ref.tensor_idx, ref.page_size_bytes
                rows = sources[number][:, :page], targets[number][:, :page]
                copy(*rows, from_.block_ids[ids], to.block_ids[ids])
                size += blocks * page
        # No time: this one says nothing of the connector.
        self._done.append(TransferResult(job_id, True, size))
        return True

    def get_finished(self) -> list[Any]:
        """What was copied since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing to wait for."""

    def shutdown(self) -> None:
        """Nothing runs."""


def get_worker(self: Any, kv_caches: Any) -> Any:
    """In place of `CPUOffloadingSpec.get_worker`: makes the worker without asking for a GPU."""
    self._worker = self._worker or self.create_worker(kv_caches)
    return self._worker


def install() -> None:
    """Replace, or raise `UnexpectedError` with one sentence and replace nothing."""
    check(*_found())
    simple, offloading = (_module(name) for name in (SIMPLE, OFFLOADING))
    spec = _named(offloading, "CPUOffloadingSpec")
    if _named(simple, "torch") is not torch:
        raise UnexpectedError(f"host copies: expected torch in {SIMPLE}, found another module")
    _compare(_named(simple, "DmaCopyBackend"), DmaCopyBackend)
    _compare(_named(offloading, "CPUOffloadingWorker"), CPUOffloadingWorker)
    _same_parameters(_named(spec, "get_worker"), get_worker)
    simple.torch, simple.DmaCopyBackend = Torch(), DmaCopyBackend
    offloading.CPUOffloadingWorker, spec.get_worker = CPUOffloadingWorker, get_worker


def _found() -> tuple[str, str]:
    """The installed vLLM's release, and the device that it runs on."""
    import vllm
    from vllm.platforms import current_platform

    return vllm.__version__, current_platform.device_type


def check(release: str, device: str) -> None:
    """Raise `UnexpectedError` unless it is the build that this was written for."""
    if (release.partition("+")[0], device) != (RELEASE, "cpu"):
        raise UnexpectedError(
            "host copies: --small plays vLLM's connectors with copies on the host for vLLM"
            f" {RELEASE} on the CPU alone, found {release} on {device or 'an unknown device'}"
        )


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnexpectedError(f"host copies: expected {name} in vLLM, found {error}") from error


def _named(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise UnexpectedError(f"host copies: expected {name} in {owner.__name__}, found none")
    return getattr(owner, name)


def _compare(theirs: type, ours: type) -> None:
    """Every method of the stand-in is one of theirs, called alike, and none of theirs is absent."""
    for name in {n for n in (*vars(theirs), *vars(ours)) if n == "__init__" or n[0] != "_"}:
        _same_parameters(_named(theirs, name), _named(ours, name))


def _same_parameters(theirs: Any, ours: Any) -> None:
    wanted, found = ([*inspect.signature(each).parameters] for each in (ours, theirs))
    if wanted != found:
        name = theirs.__qualname__
        raise UnexpectedError(f"host copies: expected {name} with {wanted}, found {found}")
