"""A load on a GPU whose stream waits for a word in pinned memory: ``python hung_gpu.py HOW``.

HOW is what the main thread does, whose stream waits for the load: ``synchronize`` with that stream;
``launch`` kernels within the step until the driver has no room for another one; ``launch-behind``
it; or ``release`` the word when the load is late, and see that all goes on. Ends with STATUS once
the watch ends it, and with 0 where it goes on.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import sys
import time

import torch
from tier.plans import a_load, a_plan, a_store

from kvoffload_patch.links import LOAD
from kvoffload_patch.transfer import deadline
from kvoffload_patch.transfer.backends.driver import Driver
from kvoffload_patch.transfer.backends.slots import SlotMemory
from kvoffload_patch.transfer.backends.staged import StagedBackend
from kvoffload_patch.transfer.engine import CopyEngine
from kvoffload_patch.transfer.layout import BlockLayout
from kvoffload_patch.transfer.memory.host_buffer import HostBuffer

STATUS = 7
DEADLINE_S, GRACE_S, PERIOD_S = 0.5, 1.0, 0.05
NUM_BLOCKS, NUM_SLOTS = 8, 4
STUCK_S = 60.0  # by then it has ended: what compiles kernels is part of it
LAUNCHES = 200_000  # more than any driver keeps


class Word:
    """A word in pinned memory, for which streams wait until it is 1."""

    def __init__(self) -> None:
        self._word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._driver = ctypes.CDLL("libcuda.so.1")

    def hold_up(self, stream: torch.cuda.Stream) -> None:
        """Whatever the stream is given from now on waits for it."""
        address, equal = ctypes.c_uint64(self._word.data_ptr()), 1  # CU_STREAM_WAIT_VALUE_EQ
        handle = ctypes.c_void_p(stream.cuda_stream)
        code = self._driver.cuStreamWaitValue32_v2(handle, address, ctypes.c_uint32(1), equal)
        assert code == 0, f"cuStreamWaitValue32 has returned {code}"

    def release(self) -> None:
        """Let them go on."""
        self._word[0] = 1


def launch_on(computed: torch.Tensor) -> None:
    """Launch until the driver has no room for another one."""
    for _ in range(LAUNCHES):
        computed.add_(1)


def main(how: str) -> None:
    """Begin a load that hangs, have the current stream wait for it, and wait for that."""
    faulthandler.dump_traceback_later(STUCK_S)  # does not need Python's lock
    deadline.DEADLINE_PERIOD_S = PERIOD_S
    kv = torch.arange(NUM_BLOCKS * 4096, dtype=torch.int32, device="cuda").view(NUM_BLOCKS, 4096)
    layout = BlockLayout([kv], NUM_BLOCKS)
    host = HostBuffer(NUM_SLOTS, layout.block_bytes, layout.device)
    host.wait_ready(NUM_SLOTS)
    backend = StagedBackend(layout, SlotMemory(host.slots, host.slots_per_piece), Driver())
    engine = CopyEngine(layout, backend, end=lambda: os._exit(STATUS))
    word, computed = Word(), torch.zeros(1, device="cuda")
    engine.begin_step(a_plan(store=a_store(1, (1,), (0,))))
    engine.end_step()
    # All kernels are loaded by then: that waits for what runs.
    engine.begin_step(a_plan((a_load(1, (2,), (0,)),), stores_done=1, wait_load=1))
    computed.add_(1)
    engine.end_step()
    engine.drain()
    torch.cuda.synchronize()

    deadline.DEADLINE_S, deadline.GRACE_S = DEADLINE_S, GRACE_S  # loading kernels takes longer
    word.hold_up(engine._links[LOAD].queue.streams.bus)
    engine.begin_step(a_plan((a_load(2, (3,), (0,)),), wait_load=2))
    computed.add_(1)
    print("hangs", flush=True)
    if how == "launch":
        launch_on(computed)
    engine.end_step()
    if how == "launch-behind":
        launch_on(computed)
    elif how == "release":
        time.sleep(DEADLINE_S + GRACE_S / 2)
        assert engine._watch is not None and engine._watch.overdue
        word.release()
    torch.cuda.current_stream().synchronize()
    assert torch.equal(kv[3], kv[1]) and computed.item() == 2
    time.sleep(DEADLINE_S + GRACE_S)
    engine.close()
    host.close()


if __name__ == "__main__":
    main(sys.argv[1])
