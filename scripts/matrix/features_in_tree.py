"""What vLLM's own two connectors do with the rows of docs/features.md that the tier refuses.

Read in the code of vLLM 0.32.0; not run. A row is to be here as long as it is refused, and no
longer.
"""

from __future__ import annotations

_NO_MODE = "vLLM has no such mode from 0.32 on"
_TAKEN = "nothing refuses it"
_KVCACHED = "kvcached says that it was not tested"
_REPLAYSSM = "vLLM refuses it beside every KV connector"
_IN_ANOTHER = "taken within a MultiConnector, if all of it take several groups"
_OF_DRAFTS = "nothing refuses stages; mode all ended with 0.31, and such keys begin with 0.33"
_NO_GROUP = "vLLM makes no such group beside prefix caching"
_ONE_RANK = "taken; stores are done when all ranks say so, of which it hears one: nothing is hit"
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
    "states on several pipeline stages that were not shown on a GPU": (_TAKEN, _TAKEN),
    "states beside a KV connector on a GPU": (_IN_ANOTHER, _IN_ANOTHER),
    "delta attention: gated delta nets beside MLA (Kimi-Linear), and of models without it": (
        _TAKEN,
        _TAKEN,
    ),
    "states that a step leaves within it, other than Mamba 2, on a GPU": (_TAKEN, _TAKEN),
    "states with speculative decoding and runner V2 on the CPU": (
        "it copies with CUDA alone",
        "an error ends the engine: it is for GPUs alone",
    ),
    "states with speculative decoding on several pipeline stages, at every block, or with keys of "
    "more tokens": (_OF_DRAFTS, _OF_DRAFTS),
    "states in one group with attention, or outside of the prefix cache": (_NO_GROUP, _NO_GROUP),
    "hits that end within a block, on another release or device": (
        "taken, but in lazy mode",
        "taken for a state's last block",
    ),
    "hits that end within a block, beside what they were not run with": (
        "taken, but in lazy mode",
        "taken; whole blocks alone beside drafts or blocks of several sizes",
    ),
    "groups of a kind that was not read": (
        "taken beside full attention",
        "taken if they are of attention, else an error ends the engine",
    ),
    "diffusion models": (_TAKEN, _TAKEN),
    "a lookup of prefixes that others have put in place of vLLM's": (_TAKEN, _TAKEN),
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
    "decode context parallelism with several groups of full attention": ("taken", "taken"),
    "decode context parallelism with states": ("taken beside full attention", "taken"),
    "prefill and decode context parallelism together": (_TAKEN, _TAKEN),
    "fault tolerance (--enable-fault-tolerance)": (_TAKEN, _TAKEN),
    "several ranks with the executor external_launcher": (_ONE_RANK, _ONE_RANK),
    "pipeline stages and asynchronous scheduling before 0.10.2": (
        "vLLM has it from 0.19 on",
        "vLLM has it from 0.11 on",
    ),
    "elastic expert parallelism": (_TAKEN, _TAKEN),
    "experts of each token in answers before 0.33": (_EXPERTS, _EXPERTS),
    "vLLM's own --kv-offloading-size": ("it is what this switches on", "likewise"),
    "vLLM's own offloading connectors, in --kv-transfer-config": (
        "it is one of them",
        "likewise",
    ),
    "kvcached": (_KVCACHED, _KVCACHED),
    "kvcached before vLLM 0.26, with several workers, or with stores that wait": (
        _KVCACHED,
        _KVCACHED,
    ),
    "kvcached with several groups, drafts, a KV connector or sleep": (_KVCACHED, _KVCACHED),
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
