"""One job of bench_serve: starts an engine, plays scenarios, and writes what each gave at its end.

Run by bench_serve.py in a process of its own: ``bench_serve_child.py SPEC``, a JSON file with
``model``, ``engine`` (arguments of `vllm.LLM`), ``sizes``, ``scenarios``, ``floor`` (see
`bench_serve_load.Bench`) and ``out``, the file that gets one line of JSON for each event. What
vLLM logs goes to this process's output.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any


class Report:
    """Appends events to a file that the parent follows."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115

    def event(self, kind: str, **values: Any) -> None:
        """One line, there at once even if this process is killed right after."""
        self._file.write(json.dumps({"event": kind, **values}) + "\n")

    def say(self, text: str) -> None:
        """Progress."""
        self.event("say", text=text)


def main() -> None:
    """Start, play, report."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    report = Report(spec["out"])
    began = time.perf_counter()
    import bench_serve_load
    from bench_serve_sizes import Sizes
    from vllm import LLM

    imported = time.perf_counter()
    llm = LLM(model=spec["model"], skip_tokenizer_init=True, seed=0, **spec["engine"])
    ready = time.perf_counter()
    report.event("ready", import_s=imported - began, start_s=ready - imported)
    bench = bench_serve_load.Bench(llm, Sizes(**spec["sizes"]), report.say, spec["floor"])
    for name in spec["scenarios"]:
        began = time.perf_counter()
        try:
            result = bench_serve_load.play(bench, name)
        except Exception as error:  # noqa: BLE001 - one scenario less is better than no results
            traceback.print_exc()
            report.event("failed", scenario=name, error=f"{type(error).__name__}: {error}"[:500])
            raise
        seconds = time.perf_counter() - began
        report.event("result", scenario=name, seconds=seconds, result=result)
    report.event("end")


if __name__ == "__main__":
    main()
