"""Numbers that tune a worker: each with its unit, and what set it.

None of them decides what is right; a wrong one costs time or memory.
"""

from __future__ import annotations

# What a rank takes between two looks at what is available: that of all threads that touch memory,
# where they are as many as there can be (`transfer/tuning.py`). A product, not a measurement.
RANK_STEP_BYTES = 512 << 20
# CPU memory that copies are measured with, fragmented ones in twice what they move
# (`TIMED_BYTES`).
MEASURED_BYTES = 128 << 20
# What a step without tokens waits for loads, at most: a new request is held up no longer. Not
# measured: less than a step of decodes takes (5.7 ms, docs/mechanisms.md).
IDLE_WAIT_S = 0.001
# A GPU's weights are added up in pieces of so many words of 4 bytes: the products of one and the
# numbers that they are made with take 64 MiB of its memory, and 16 GB are 1,000 pieces. It has not
# been measured.
WEIGHT_PIECE_WORDS = 1 << 22
# Weights in CPU memory are compared up to so many bytes, which takes a fraction of a second.
# Not measured: it bounds what a step can be held up where layers are kept there.
HOST_WEIGHT_BYTES = 256 << 20
# How long a call waits for the step that it has come into, where steps have a thread of their own.
# Not measured: less than the engine waits for the call (`RPC_TIMEOUT_S`), and longer than any step.
STEP_ENDS_S = 240.0
