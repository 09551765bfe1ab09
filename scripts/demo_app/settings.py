"""The sizes that the demonstration runs with, for a GPU and for a machine without one."""

import shutil
import subprocess
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version


@dataclass(frozen=True)
class Settings:
    """One size of the demonstration; `gpu_blocks` is chosen to hold 2 to 3 of the conversations."""

    device: str
    # The model.
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    dtype: str
    max_model_len: int
    # The server.
    block_size: int
    gpu_blocks: int
    cpu_gib: int
    env: dict[str, str] = field(default_factory=dict)
    # The load: characters of text, as the tokenizer is trained on this machine.
    conversations: int = 14
    turns: int = 4
    document_chars: int = 3600
    question_chars: int = 400
    answer_tokens: int = 8


def has_gpu_vllm() -> bool:
    """Whether an NVIDIA GPU answers and the installed vLLM is not the CPU build."""
    try:
        if "cpu" in version("vllm"):
            return False
    except PackageNotFoundError:
        return False
    smi = shutil.which("nvidia-smi")
    return smi is not None and subprocess.run([smi, "-L"], capture_output=True).returncode == 0


def settings() -> Settings:
    """The settings for this machine."""
    if has_gpu_vllm():
        return Settings(
            device="GPU",
            layers=16,
            hidden=2048,
            heads=16,
            kv_heads=4,
            dtype="bfloat16",
            max_model_len=16384,
            block_size=16,
            gpu_blocks=2048,
            cpu_gib=8,
            # Answers are compared, so what a token gets must not depend on how its prefix came.
            env={"VLLM_BATCH_INVARIANT": "1"},
            document_chars=36000,
            question_chars=1200,
        )
    return Settings(
        device="CPU",
        layers=8,
        hidden=512,
        heads=8,
        kv_heads=4,
        dtype="float32",
        max_model_len=3072,
        block_size=128,
        gpu_blocks=32,
        cpu_gib=1,
        env={
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # On a busy machine, several threads would wait for each other at every layer.
            "OMP_NUM_THREADS": "1",
        },
    )
