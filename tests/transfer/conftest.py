"""Where there is no GPU, kernels run on Triton's interpreter; they become its own when imported."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
import triton  # before what follows: its own functions must not be interpreted
import triton.runtime.interpreter

if not torch.cuda.is_available():
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    from kvoffload_patch.transfer.backends import kernels

    # But for the one that kernels of ours call.
    triton.language.sum = triton.runtime.interpreter.InterpretedFunction(triton.language.sum.fn)
    assert type(kernels.move_tiles).__name__ == "InterpretedFunction", "imported too early"
    # Processes that other tests start must not have it.
    if before is None:
        del os.environ["TRITON_INTERPRET"]
    else:
        os.environ["TRITON_INTERPRET"] = before

# Machines that run what is marked `gpu` need pytest, torch, numpy and Triton only.
NEED_HYPOTHESIS = ["test_engine_model.py", "memory/test_host_buffer_pieces.py"]
collect_ignore = [] if find_spec("hypothesis") else NEED_HYPOTHESIS
