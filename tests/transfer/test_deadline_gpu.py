"""A load that never ends on a GPU ends its process, while a thread of that is in the driver."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transfer import hung_gpu
from transfer.layouts import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

LIMIT_S = 120.0  # what compiles kernels is part of it
ENDING_S = 10.0


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("synchronize", hung_gpu.STATUS),
        ("launch", hung_gpu.STATUS),
        ("launch-behind", hung_gpu.STATUS),
        ("release", 0),
    ],
)
def test_a_load_that_never_ends_ends_its_process_in_time(how: str, status: int) -> None:
    with subprocess.Popen(
        [sys.executable, str(Path(hung_gpu.__file__)), how],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            begun = process.stdout.readline()
            begin = time.monotonic()
            _, said = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()  # and with it its streams
    took = time.monotonic() - begin
    assert begun == "hangs\n" and process.returncode == status, said[-3000:]
    assert ("so this process ends: restart the server" in said) == (status == hung_gpu.STATUS)
    if status:
        assert hung_gpu.DEADLINE_S + hung_gpu.GRACE_S < took < ENDING_S
