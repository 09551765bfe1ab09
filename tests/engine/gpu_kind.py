"""One way to run an engine on a GPU, as `gpu_kinds` plays it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine import gpu_nodes, gpu_states
from engine.gpu_answers import BEHIND, COMMANDED, SLEEPS, STATES

BLOCKS_KEPT, BLOCKS_FEW = 4096, 288  # GPU blocks of 16 tokens
EAGER = {"enforce_eager": True}
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}
# Takes every size of a latent; FlashAttention's kernels for it are a large part of a release.
MLA = {**GRAPHS, "attention_backend": "TRITON_MLA"}
# Every head has the size that attention kernels for a GPU have; ranks hold different heads.
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128}


@dataclass(frozen=True)
class Kind:
    """One way to run an engine.

    Attributes:
        model: a folder that one of `MODELS` writes.
        engine: arguments of `vllm.LLM`; ``{models}`` in a text is where the models are.
        gpus: that it takes.
        runners: that have it.
        groups: of layers with their own blocks.
        one_copy: ranks that hold the same bytes, as the engine says it; empty: none do.
        shards: ranks that each hold a part of every block's tokens.
        asked: the scenario in which one prompt is asked at a time; its answers must be equal.
        settings: of the tier.
        variables: of every engine.
        kvcached: variables of kvcached, beside which the engine with the tier runs; empty: without.
        ray: whether Ray starts its ranks, on two nodes with a GPU each, see `gpu_nodes`.
        lmcache: its variables, where the engines with few blocks have its connector, one of them
            without the tier; empty: without.
        connector: whether the engine with the tier has the connector of `state_connector`, too.
        exact: vLLM computes a request as if it were alone, so prompts asked together are compared.
        blocks: of the GPU, without the tier and with it.
        late: how late the tier's copies are, see `late_copies`.
        unsteady: first answers that are not compared, see `gpu_states.UNSTEADY`.
        parts: whether vLLM's own hits end within blocks.
        unrepeated: whether plain vLLM does not always answer a prompt as it did at first: then
            an answer must be one of those that it gave to this prompt.
        by_layer: whether its blocks are large enough for loads that come by layer.
    """

    name: str
    model: str
    engine: dict[str, Any]
    gpus: int = 1
    runners: tuple[str, ...] = ("v1", "v2")
    groups: int = 1
    one_copy: str = ""
    shards: int = 1
    asked: str = "singles"
    settings: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    kvcached: dict[str, str] = field(default_factory=dict)
    lmcache: dict[str, str] = field(default_factory=dict)
    ray: bool = False
    connector: bool = False
    exact: bool = False
    blocks: tuple[int, int] = (BLOCKS_KEPT, BLOCKS_FEW)
    late: str = ""
    by_layer: bool = False
    parts: bool = False
    unrepeated: bool = False
    unsteady: int = 0

    @property
    def says(self) -> tuple[bool, str]:
        """Whether the engine says that loads come by layer, and which ranks keep one copy."""
        return self.by_layer, self.one_copy

    @property
    def scenarios(self) -> list[str]:
        """What is played on it."""
        if self.asked == STATES:
            guesses = ["guesses_alone"] if "speculative_config" in self.engine else []
            return [*gpu_states.SCENARIOS[:-1], *guesses, gpu_states.SCENARIOS[-1]]
        if self.asked in ("each_engine", SLEEPS, COMMANDED, BEHIND):
            return [self.asked]
        if self.asked in gpu_nodes.LOST:
            return ["setup", self.asked]
        also = ["batches"] if self.asked == "singles" else []
        also += ["shrunk"] if self.kvcached else []
        return ["setup", "sensitivity", self.asked, *also]
