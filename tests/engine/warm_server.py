"""A process that has imported vLLM, and forks a server of vLLM's for each line that it is given.

``python warm_server.py IN OUT``, with two file descriptors: a line
``{"spec": {"argv"}, "env", "log"}`` is answered with ``started PROCESS``, and with
``ended PROCESS STATUS`` later. Importing vLLM takes longer than all else of a server's start; what
a fork shares with the next one is modules, the tier's patches among them.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import sys
from contextlib import suppress
from typing import Any

import driver

_PERIOD_S = 0.1
# What an API server imports when it is started.
_LATER = ("vllm.entrypoints.cli.main", "vllm.entrypoints.cli.serve")


def main(requests: int, answers: int) -> None:
    """Fork for each line; a child becomes a server."""
    driver.before_vllm()
    driver.change_platform(async_scheduling=False, fork_workers=True)
    for name in _LATER:
        importlib.import_module(name)
    with suppress(ImportError):  # elsewhere in other releases, and imported later there
        importlib.import_module("vllm.entrypoints.openai.api_server")
    driver.warm_up()
    asked = _serve(requests, answers)
    if asked is not None:
        spec = driver.become(asked)
        sys.argv = ["vllm", *spec["argv"]]
        importlib.import_module("vllm.entrypoints.cli.main").main()


def _serve(requests: int, answers: int) -> dict[str, Any] | None:
    """Until the pipe is closed; returns in each child what it was asked for."""
    servers: set[int] = set()
    rest = b""
    print_to = os.fdopen(answers, "w", buffering=1)
    while True:
        if select.select([requests], [], [], _PERIOD_S)[0]:
            read = os.read(requests, 1 << 16)
            if not read:
                return None
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                pid = os.fork()
                if not pid:
                    os.close(requests)
                    print_to.close()
                    asked: dict[str, Any] = json.loads(line)
                    return asked
                servers.add(pid)
                print("started", pid, file=print_to)
        for pid in list(servers):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                servers.discard(pid)
                print("ended", pid, os.waitstatus_to_exitcode(status), file=print_to)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
