"""What is compared: each mode's command line and environment, and whether it can run here."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvoffload_patch.cli.doctor.numa import has_gpu

OFF, ON, SIMPLE, OFFLOADING = "off", "on", "simple", "offloading"
# Each with its name in tables.
TITLES = {
    OFF: "no tier",
    ON: "kvoffload",
    SIMPLE: "SimpleCPUOffloadConnector",
    OFFLOADING: "OffloadingConnector",
}
_SIMPLE_SWITCH = "VLLM_USE_SIMPLE_KV_OFFLOAD"
# What shows that a release has a connector and the options that choose it: file and text in it.
_CONNECTORS = "distributed/kv_transfer/kv_connector/v1"
_SHOWN_BY = {
    SIMPLE: (("envs.py", _SIMPLE_SWITCH), (f"{_CONNECTORS}/simple_cpu_offload_connector.py", "")),
    OFFLOADING: (
        ("engine/arg_utils.py", "--kv-offloading-size"),
        (f"{_CONNECTORS}/offloading_connector.py", ""),
    ),
}


def unavailable(mode: str, vllm: Path | None, gpu: bool) -> str:
    """Why a mode cannot run, without a full stop; empty if it can.

    Args:
        vllm: folder of the installed package; None if there is none.
        gpu: whether there is one.
    """
    if mode not in _SHOWN_BY:
        return ""
    title = TITLES[mode]
    for file, text in _SHOWN_BY[mode]:
        found = vllm / file if vllm else None
        if found is None or not found.is_file() or text not in found.read_text("utf-8", "replace"):
            return f"the installed vLLM has no {title}"
    return "" if gpu else f"{title} needs a GPU"


def installed() -> tuple[Path | None, bool]:
    """The folder of the installed vLLM, which is not imported, and whether there is a GPU."""
    spec = importlib.util.find_spec("vllm")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return (Path(folders[0]) if folders else None), has_gpu()


def command(mode: str, gib: float, model: str, arguments: Sequence[str]) -> list[str]:
    """The command line of a mode's server.

    Args:
        gib: CPU memory of every mode but `OFF`.
        arguments: what follows the model, the same in all modes.
    """
    serve = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, *arguments]
    if mode == ON:
        return [sys.executable, "-m", "kvoffload_patch", *serve]
    if mode == OFF:
        return serve
    size = ["--kv-offloading-size", f"{gib:g}", "--kv-offloading-backend", "native"]
    return [*serve, *size, "--no-disable-hybrid-kv-cache-manager"]


def environment(mode: str, gib: float, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a mode's server: the user's, but for what decides on the mode."""
    kept = {k: v for k, v in environ.items() if k not in ("KVOFFLOAD_ENABLE", _SIMPLE_SWITCH)}
    if not any(folder.exists() and folder.samefile(".") for folder in map(Path, sys.path)):
        kept["PYTHONSAFEPATH"] = "1"  # nor does the server take a vllm of this folder (Python 3.11)
    if mode == ON:
        return {**kept, "KVOFFLOAD_CPU_GIB": f"{gib:g}"}
    plain = {k: v for k, v in kept.items() if not k.startswith("KVOFFLOAD_")}
    plain["KVOFFLOAD_DISABLE"] = "1"
    return {**plain, _SIMPLE_SWITCH: "1"} if mode == SIMPLE else plain
