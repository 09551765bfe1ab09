"""One mode: starts its server, plays the phases that it is asked for, and ends the server.

Run by `serve.process` as ``python -m scripts.bench.chats.child SPEC``. SPEC is a JSON file with
``command`` and ``port`` of the server, ``load``, ``times``, and ``out``, the file that gets one
line of JSON for each event. A line of standard input is the name of a phase; its end ends all. What
the server logs goes to this process's output.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from scripts.bench.chats import client, play
from scripts.bench.chats.load import Load, Tokens
from scripts.bench.chats.server import Server, ServerEnded
from scripts.bench.serve.child import Report, reported


def main() -> None:
    """Start, play, end."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    report = Report(spec["out"])
    server = Server(spec["command"], spec["port"])
    try:
        report.event("ready", import_s=0.0, start_s=server.wait())
        asyncio.run(phases(spec, server.url, report))
    except ServerEnded as error:
        report.event("failed", scenario="start", error=str(error))
        return
    finally:
        server.end()
    report.event("end")


async def phases(spec: dict[str, Any], url: str, report: Report) -> None:
    """What standard input asks for, until it ends."""
    load = Load(**spec["load"])
    await asyncio.sleep(load.settle_s)
    async with client.session() as session:

        async def ask(name: str, prompt: Tokens, answer: int) -> client.Answer:
            return await client.ask(session, url, name, prompt, answer)

        player = play.Player(load, ask, spec["times"])
        while phase := (await asyncio.to_thread(sys.stdin.readline)).strip():
            began = time.perf_counter()
            with reported(report, phase):
                before = await client.counted(session, url)
                result = await player.play(phase)
                result["tier"] = changes(before, await client.counted(session, url))
            spent = time.perf_counter() - began
            report.say(f"{play.words(phase, result)} ({spent:.1f} s in all)")
            report.event("played", scenario=phase, command=phase, result=result)


def changes(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What has changed of a server's samples: counters by how much, others to what."""
    changed = {name: value for name, value in after.items() if value != before.get(name, 0.0)}
    return {
        name: round(value - before.get(name, 0.0) * _counts(name), 6)
        for name, value in changed.items()
    }


def _counts(name: str) -> bool:
    """Whether a sample is a counter, or of a histogram."""
    return name.partition("{")[0].endswith(("_total", "_sum", "_count"))


if __name__ == "__main__":
    main()
