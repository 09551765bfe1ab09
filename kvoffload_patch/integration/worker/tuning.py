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
# What a step without tokens waits for loads, at most: a new request is held up no longer. Less than
# a step of decodes takes (5.7 ms, docs/mechanisms.md), and more than such a step costs the engine's
# thread (0.3 ms, the same).
IDLE_WAIT_S = 0.001
# A GPU's weights are added up in pieces of so many words of 4 bytes: the products of one and the
# numbers that they are made with take 64 MiB of its memory, and 16 GB are 1,000 pieces. To be
# measured: how long `sleep` at level 1 takes with a quarter and four times as many, on a GPU.
WEIGHT_PIECE_WORDS = 1 << 22
# Weights in CPU memory are compared up to so many bytes, which takes one core 0.8 to 1.5 s
# (`weights_digest` of one layer, two busy cores, 2026-11-30). More than the scales and buffers that
# a model on a GPU keeps there, some MiB, and less than where layers are kept there, some GiB, for
# which a step would be held up for longer.
HOST_WEIGHT_BYTES = 256 << 20
# How long a call waits for the step that it has come into, where steps have a thread of their own.
# Between the 90 s after which a hung copy has ended the process of its rank (transfer/tuning.py,
# `DEADLINE_S` and `GRACE_S`), and the 300 s that the engine waits for the call (`RPC_TIMEOUT_S`).
STEP_ENDS_S = 240.0
