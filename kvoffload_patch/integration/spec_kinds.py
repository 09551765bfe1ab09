"""Which kinds of vLLM's KV cache specs are understood.

Both sides ask. vLLM's scheduler is told the spec of one layer of a group; only the workers are told
those of all of them.
"""

from __future__ import annotations

from typing import Any

# Specs whose blocks are written once, by the step that computes them, and hold nothing else.
KNOWN_SPECS = {
    "FullAttentionSpec",
    "TQFullAttentionSpec",
    "MLAAttentionSpec",
    "HiddenStateCacheSpec",
    "SlidingWindowSpec",
    "SlidingWindowMLASpec",
    "ChunkedLocalAttentionSpec",
}
# Specs of groups that may be left out of the prefix cache: vLLM makes their blocks again behind a
# hit, of tokens that it computes once more, or needs none of them.
UNCACHED_SPECS = {"CircularBufferSpec", "SlidingWindowMLASpec"}
# Layers whose state depends on all tokens so far.
STATE_SPEC = "MambaSpec"


def unknown_layer(kv_cache_config: Any) -> str:
    """Why a layer beside others of its group is not understood; empty if each of them is.

    Args:
        kv_cache_config: a worker's, with a spec for each layer of a group.
    """
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        for name, spec in getattr(group.kv_cache_spec, "kv_cache_specs", {}).items():
            kind = type(spec).__name__
            if kind not in {*KNOWN_SPECS, *UNCACHED_SPECS, STATE_SPEC}:
                known = ", ".join(sorted(KNOWN_SPECS))
                return f"KV cache group {index}: expected one of {known}, found {kind} in {name}"
    return ""
