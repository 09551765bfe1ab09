"""What vLLM's own two connectors do with the rows of docs/features.md that the tier refuses.

Read in the code of vLLM 0.32.0; not run. A row is to be here as long as it is refused, and no
longer.
"""

from __future__ import annotations

_NO_MODE = "vLLM has no such mode from 0.32 on"
_TAKEN = "nothing refuses it"
_REPLAYSSM = "vLLM refuses it beside every KV connector"
_EXPERTS = "taken; vLLM raises where it has none of a hit's; refused from 0.22 to 0.30"
# By row: SimpleCPUOffloadConnector, OffloadingConnector.
SAID: dict[str, tuple[str, str]] = {
    "states of a kind that was not shown to come back": (
        "taken beside full attention",
        "taken",
    ),
    "states on a device on which they were not shown": ("taken beside full attention", "taken"),
    "states at every block that were not shown to come back": (_NO_MODE, _NO_MODE),
    "states with speculative decoding that were not shown to come back": (_TAKEN, _TAKEN),
    "states with --use-replayssm": (_REPLAYSSM, _REPLAYSSM),
    "hits that end within a block, on another release or device": (
        "taken, but in lazy mode",
        "taken for a state's last block",
    ),
    "encoder-decoder models": (
        "off: vLLM turns prefix caching off for them",
        "an assertion ends the engine",
    ),
    "groups kept in host memory": (
        "vLLM warns that it was not validated",
        "an assertion ends the engine",
    ),
    "decode context parallelism beside sliding windows": (
        "vLLM refuses it",
        "vLLM refuses it",
    ),
    "prefill context parallelism on another release or device": (_TAKEN, "taken"),
    "elastic expert parallelism": (_TAKEN, _TAKEN),
    "experts of each token in answers before 0.33": (_EXPERTS, _EXPERTS),
    "vLLM's own --kv-offloading-size": ("it is what this switches on", "likewise"),
    "vLLM's own offloading connectors, in --kv-transfer-config": (
        "it is one of them",
        "likewise",
    ),
    "kvcached": ("kvcached says that it was not tested", "kvcached says that it was not tested"),
}


def table() -> list[str]:
    """The lines of the page."""
    lines = [
        "",
        "## What is refused, and vLLM's own connectors",
        "",
        "What they do with it was read in the code of vLLM 0.32.0 and not run.",
        "",
        "| Shape or feature | SimpleCPUOffloadConnector | OffloadingConnector |",
        "| --- | --- | --- |",
    ]
    return lines + [f"| {row} | {simple} | {other} |" for row, (simple, other) in SAID.items()]
