"""A command `serve` that is taken for a vLLM engine.

A process that has a file of vLLM's compiled code mapped and listens on a socket.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sandbox import Sandbox

PATIENCE_S = 60

SERVE = """\
import mmap, os, signal, socket, sys

kinds = sys.argv[1:]
if "armed" in kinds:
    import vllm
kernels = open(os.path.join(sys.prefix, "vllm/_C.abi3.so"), "rb")
mapped = mmap.mmap(kernels.fileno(), 0, access=mmap.ACCESS_READ)
if "attached" in kinds:
    from kvoffload_patch import launch_token
    launch_token.confirm(launch_token.ATTACHED)
ends = {signal.SIGTERM, signal.SIGINT}
signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # a handler may run right before a wait begins
deaf = "deaf" in kinds
if "child" in kinds:
    deaf = os.fork() != 0
    kinds[-1] = "child" if deaf else "fork"
print(*kinds, os.getpid(), flush=True)
server = socket.socket()
if not deaf:
    server.listen()
signal.sigwait(ends)
os.write(1, " ".join([*kinds, "stopped\\n"]).encode())
os._exit(7)
"""


def with_engine(box: Sandbox) -> Sandbox:
    box.write(box.root / "vllm/_C.abi3.so", "x")
    box.command("serve", SERVE)
    return box


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)
