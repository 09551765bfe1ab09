"""CPU memory that becomes usable slot by slot on the CPU device, where it all is at once.

TEST_GROWTH says how far it goes on each rank: with ``60 45``, rank 1 gets no more than 45 slots.
Every rank has one more each time that it is asked, and rank 0 three.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from kvoffload_patch.transfer.errors import TransferError
from kvoffload_patch.transfer.memory.host_buffer import HostBuffer


def install() -> None:
    """Make memory of this process, and of those that it forks, grow as the environment says."""
    limits = [int(limit) for limit in os.environ["TEST_GROWTH"].split()]
    usable = {}

    def limit(buffer: HostBuffer) -> int:
        return min(limits[_rank()], buffer.num_slots)

    def num_ready(buffer: HostBuffer) -> int:
        more = 1 if _rank() else 3
        usable[id(buffer)] = min(usable.get(id(buffer), 1) + more, limit(buffer))
        return usable[id(buffer)]

    def wait_ready(buffer: HostBuffer, num_slots: int) -> None:
        if num_slots > usable[id(buffer)]:
            raise TransferError(f"rank {_rank()} was told to use a slot that it does not have")

    def growth_ended(buffer: HostBuffer) -> str:
        there = usable.get(id(buffer), 1)
        return f"{there} slots are all of rank {_rank()}" if there == limit(buffer) else ""

    made: Any = HostBuffer
    made.num_ready = property(num_ready)
    made.growth_ended = property(growth_ended)
    made.wait_ready = wait_ready
    made.wait_up_to = lambda buffer, _: buffer.num_ready


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
