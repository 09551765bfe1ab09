"""Triton's kernels on its interpreter, with which vLLM's model runner V2 starts on the CPU.

vLLM's CPU build refuses that runner without a Triton that has a backend for the CPU, and the one
that is published has none. Here it seems to have one, and each kernel is interpreted. Put in place
before vLLM is imported, in the process that all others are forked from. Plain vLLM plays with the
same.
"""

from __future__ import annotations

import os


class _Driver:
    """Of the backend; the interpreter launches nothing with it."""

    @staticmethod
    def is_active() -> bool:
        return True


class _Backend:
    driver = _Driver
    compiler = None


def install() -> None:
    """Put them in place, in this process."""
    os.environ["TRITON_INTERPRET"] = "1"
    # torch's compiler would have to be told what it compiles for.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    from triton.backends import backends

    backends["cpu"] = _Backend
