"""Compiles the kernels for NVIDIA GPUs, which takes none. Run as a process of its own.

Prints a line for each: GPU, kernel, and how many accesses of global memory are 16 bytes wide.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvoffload_patch.transfer.backends import kernels

POINTERS = ("rows", "flat", "tiles", "block_ids", "sums", "totals", "verdict", "source", "target")


def compiled(kernel: Any, capability: int, constants: dict[str, Any]) -> str:
    """PTX of a kernel whose pointers are aligned to 16 bytes, and whose numbers are any."""
    names = kernel.arg_names
    kinds = {name: "*i64" if name in POINTERS else "i32" for name in names}
    kinds |= dict.fromkeys(constants, "constexpr")
    pointers = [at for at, name in enumerate(names) if kinds[name] == "*i64"]
    source = ASTSource(
        fn=kernel,
        signature=kinds,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(at,): [["tt.divisibility", 16]] for at in pointers},
    )
    made = triton.compile(source, GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    assert made.asm["cubin"]
    ptx: str = made.asm["ptx"]
    return ptx


def main() -> None:
    """Every kind of call that `TileMover` makes, on an A100, an H100 and a B200."""
    for capability in (80, 90, 100):
        found = []
        for to_flat, (check, complete), whole in itertools.product(
            (True, False), ((False, False), (True, True), (True, False)), (True, False)
        ):
            constants: dict[str, Any] = {
                "TO_FLAT": to_flat, "TILE": 1024, "ALIGN": 2, "WHOLE": whole, "CHECK": check,
                "COMPLETE": complete,
            }  # fmt: skip
            if not check:
                constants |= {"sums": None, "totals": None}
            if to_flat or not check:
                constants["verdict"] = None
            found.append(compiled(kernels.move_tiles, capability, constants).count(".v2.b64"))
        print(capability, "move_tiles", *found)
        ptx = compiled(kernels.copy_ids, capability, {"SIZE": 1024})
        print(capability, "copy_ids", ptx.count(".v2.b64"))


if __name__ == "__main__":
    sys.exit(main())
