"""Where a rank's device says that a load brought wrong bytes, for the engine to see."""

from __future__ import annotations

import logging
from typing import Any

from kvoffload_patch.integration.slot_counts import SlotCounts

logger = logging.getLogger("vllm.kvoffload_patch")


class Alarm:
    """A rank's alarm, in the board that the ranks share.

    Args:
        board: the rank's view of it, registered with the device until `close`.
        device: a `kvoffload_patch.transfer.device.Device` with memory of its own.

    Attributes:
        word: ``int64 [2]``, zeros; None where the device cannot write there.
    """

    def __init__(self, board: SlotCounts, device: Any) -> None:
        import torch

        whole = torch.frombuffer(board.memory, dtype=torch.uint8)
        first, size = board.alarm_at()
        self.word: Any = whole[first : first + size].view(torch.int64)
        self._address, self._registrar = whole.data_ptr(), device.registrar()
        error = self._registrar.register(self._address, whole.numel())
        if error:
            self.word = None
            logger.warning(
                "kvoffload_patch: expected memory in which this rank's device can say that a load "
                "brought wrong bytes, found error %d when it was registered; what this rank finds "
                "wrong is known one step later.", error,
            )  # fmt: skip

    def close(self) -> None:
        """No copy is under way any more."""
        if self.word is not None:
            self._registrar.unregister(self._address)
            self.word = None


def open_alarm(board: SlotCounts, on: Any, checksums: Any) -> Alarm | None:
    """Have all loads of a rank that reports nothing write to its alarm what they find wrong.

    Args:
        on: the `torch.device` of its KV tensors.
        checksums: its `kvoffload_patch.transfer.integrity.Checksums`.

    Returns:
        What is to be closed; None where no device compares, or where all ranks have compared a
        load before any request gets it.
    """
    from kvoffload_patch.transfer.device import device_of

    device = device_of(on)
    if device.is_host or checksums.every <= 1:  # none has one, or all have
        return None
    alarm = Alarm(board, device)
    checksums.alarm = alarm.word
    return alarm


def reports(worker: Any) -> bool:
    """Whether the engine gets this rank's result: of the last stage's ranks, the first one's.

    As vLLM has it in `MultiprocExecutor._get_output_rank`. Of an executor that takes another one's,
    a mismatch on that rank ends the engine, and is no miss, but for checksums of all blocks.
    """
    parallel = worker.vllm_config.parallel_config
    in_stage = getattr(parallel, "tensor_parallel_size", 1)
    in_stage *= getattr(parallel, "prefill_context_parallel_size", 1)
    return bool(worker.rank == parallel.world_size - in_stage)
