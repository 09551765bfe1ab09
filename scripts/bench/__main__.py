"""Measurements: python scripts/bench COMMAND; see --help."""

import sys
from pathlib import Path

# Modules are imported by their full names; the folder on the path would hide others' modules.
sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts import dispatch  # noqa: E402

COMMANDS = {
    "serve": ("serve.command", "S1 to S4 on a real vLLM, beside what else keeps KV in CPU memory"),
    "chats": (
        "chats.command",
        "conversations with a server over HTTP, beside plain vLLM's floor",
    ),
    "step": ("step", "what the tier adds to a scheduler step on the host; needs no GPU"),
    "transfer": ("transfer.command", "speed of the copy backends, and what they cost matmuls"),
    "copy_queue": ("probes.copy_queue", "how long a copy waits behind others on a CUDA GPU"),
    "long": ("probes.long", "long prompts from CPU memory, quiet and beside answers"),
    "beside": ("probes.beside", "what a step takes longer while a load crosses the bus"),
    "copy_thread": ("probes.copy_thread", "what enqueuing copies costs a step; needs no GPU"),
    "enqueue": ("probes.enqueue", "what enqueuing copies costs the host, on a CUDA GPU"),
    "tuned": ("probes.tuned", "copies with other values of the numbers that tune them"),
    "touch": ("probes.touch", "how fast the kernel gives a process its memory; needs no GPU"),
    "mechanisms": ("probes.mechanisms", "what each mechanism for speed is worth, in one engine"),
    "trace": ("probes.trace", "the same by time in the engine, request by request, with its bound"),
    "modelled": ("probes.modelled", "loads and steps on vLLM's scheduler over a modelled GPU"),
    "modelled_singles": ("probes.modelled_singles", "what of prompts in turns is loaded there"),
    "page": ("page", "write the tables of the pages on performance from docs/measured/current"),
    "lmcache": ("serve.lmcache", "pack LMCache for `serve` on a machine without network"),
}

if __name__ == "__main__":
    sys.exit(dispatch("bench", "Measures the tier and its parts.", COMMANDS))
