"""Workers that vLLM's Ray executor starts: our variables reach them as vLLM's own do.

They are started by Ray's processes, not by the engine, with the environment of their node. vLLM
sends them its own variables. From 0.21 on it sends all there are; its other Ray executor copies by
prefix, and ours is not among these. With them a worker arms by vLLM's plugin entry point, which it
asks for after it has got them and before it makes a model runner.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Any

from kvoffload_patch.config import PREFIX
from kvoffload_patch.integration.install import older_than

PREFIXES = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
_EXECUTORS = "vllm.v1.executor.ray_"


def pass_variables_on(executor_class: Any, environ: MutableMapping[str, str] | None = None) -> None:
    """Have vLLM copy our variables to the workers of an engine that is about to be made.

    With another executor nothing is done: vLLM's variables are part of the key of what it
    compiles. Before 0.17 vLLM can be told no prefix; set ours where Ray is started.

    Args:
        executor_class: of the engine; may be none of vLLM's.
        environ: of the engine's process (default: this one).
    """
    classes = getattr(executor_class, "__mro__", ())
    if not any(c.__module__.startswith(_EXECUTORS) for c in classes) or older_than("0.17"):
        return
    env = os.environ if environ is None else environ
    asked = [prefix.strip() for prefix in env.get(PREFIXES, "").split(",") if prefix.strip()]
    if PREFIX not in asked:
        env[PREFIXES] = ",".join([*asked, PREFIX])
