"""Where a rank whose result nobody gets says, for the engine, that a step of it has gone wrong."""

from __future__ import annotations

import logging
from typing import Any

from kvoffload_patch.integration.slot_counts import STEP_FAILED, SlotCounts

logger = logging.getLogger("vllm.kvoffload_patch")


class Alarm:
    """A rank's alarm, in the board that the ranks share.

    Args:
        board: the rank's view of it, registered with the device until `close`.
        device: a `kvoffload_patch.transfer.device.Device` that says there which bytes are wrong;
            None: none does.

    Attributes:
        word: ``int64 [2]``, zeros; None where the device does not write there.
    """

    def __init__(self, board: SlotCounts, device: Any = None) -> None:
        import torch

        whole = torch.frombuffer(board.memory, dtype=torch.uint8)
        first, size = board.alarm_at()
        own = whole[first : first + size].view(torch.int64)
        self._own, self._address = own, whole.data_ptr()
        self.word: Any = None if device is None else own
        self._registrar = None if device is None or device.is_host else device.registrar()
        error = self._registrar.register(self._address, whole.numel()) if self._registrar else 0
        if error:
            self.word = self._registrar = None
            logger.warning(
                "kvoffload_patch: expected memory in which this rank's device can say that a load "
                "brought wrong bytes, found error %d when it was registered; what this rank finds "
                "wrong is known one step later.", error,
            )  # fmt: skip

    def ring(self) -> None:
        """No token of the step under way may leave; nothing is changed if that was said already."""
        if not self._own[0]:
            self._own[0] = STEP_FAILED

    def check(self) -> None:
        """Raises RuntimeError if anything was said, which the engine may not have seen."""
        if self._own[0]:
            raise RuntimeError(
                "kvoffload_patch: expected all steps of this rank to be carried out with the bytes "
                "that they read, found that one was not; restart the server."
            )

    def close(self) -> None:
        """No copy is under way any more."""
        if self._registrar is not None:
            self._registrar.unregister(self._address)
            self._registrar = None
        self.word = None


def open_alarm(board: SlotCounts, on: Any, checksums: Any) -> Alarm:
    """Have all loads of a rank that reports nothing write to its alarm what they find wrong.

    They do not where no block has a checksum, or all have: then ranks compare a load before any
    request gets it.

    Args:
        on: the `torch.device` of its KV tensors.
        checksums: its `kvoffload_patch.transfer.integrity.Checksums`.

    Returns:
        What is to be closed.
    """
    from kvoffload_patch.transfer.device import device_of

    alarm = Alarm(board, device_of(on) if checksums.every > 1 else None)
    checksums.alarm = alarm.word
    return alarm


def ranks_of_stage(worker: Any) -> int:
    """Ranks in one pipeline stage of an engine."""
    parallel = worker.vllm_config.parallel_config
    in_stage = getattr(parallel, "tensor_parallel_size", 1)
    return int(in_stage * getattr(parallel, "prefill_context_parallel_size", 1))


def ranks_of_engine(worker: Any) -> int:
    """Ranks that carry out one step together, of one scheduler or of one each."""
    stages = getattr(worker.vllm_config.parallel_config, "pipeline_parallel_size", 1)
    return ranks_of_stage(worker) * int(stages)


def reports(worker: Any) -> bool:
    """Whether the engine gets this rank's result: of the last stage's ranks, the first one's.

    As vLLM has it in `MultiprocExecutor._get_output_rank`. Of an executor that takes another one's,
    what fails on that rank ends the engine.
    """
    ranks = ranks_of_engine(worker)
    return bool(ranks == 1 or worker.rank == ranks - ranks_of_stage(worker))
