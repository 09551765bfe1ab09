"""Prints what `gpu_kinds` finds, a JSON object on a line after each kind.

`scripts/matrix gpu` runs it as ``python tests/engine/gpu_program.py RUNNERS JOBS KINDS``, such as
``v1,v2 4 "mla|drafts"``, with the root and tests/ on PYTHONPATH, and adds when and on which commit.
KINDS are parts of names in `KINDS`; an empty one takes all.
"""

from __future__ import annotations

import json
import sys

from engine import gpu_kinds

from scripts import REFUSED


def main(runners: str, jobs: str, kinds: str) -> int:
    """Play them; `REFUSED` if nothing can be played."""
    import torch

    asked, gpus = (runners.split(","), gpu_kinds.parts_of(kinds)), torch.cuda.device_count()
    if not gpu_kinds.chosen(*asked, gpus):
        found = f"{kinds!r} on {gpus}" if kinds else gpus
        print(f"error: expected kinds of engines and GPUs for one, found {found}", file=sys.stderr)
        return REFUSED
    for found in gpu_kinds.main(asked[0], int(jobs), asked[1]):
        print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
