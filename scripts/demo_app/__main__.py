"""Play one multi-turn chat load against vLLM without and with the CPU tier, and compare.

Run it through scripts/demo, which makes the environment. Ends with status 1 and one sentence if
an answer differs between the two runs or nothing was loaded from CPU memory.
"""

import argparse
import json
import signal
import sys
from pathlib import Path

from openai import OpenAIError

from kvoffload_patch.cli.bench.errors import ServerFailed
from scripts.demo_app.load import Run, play
from scripts.demo_app.model import ensure_model
from scripts.demo_app.report import OFF, ON, draw, table
from scripts.demo_app.server import DemoError, Server
from scripts.demo_app.settings import Settings, settings

OUT = Path("demo-out")


def serve_and_play(size: Settings, tier: bool) -> Run:
    """Start a server, play the load, stop the server."""
    log = OUT / f"server-{'on' if tier else 'off'}.log"
    with Server(OUT / "model", size, tier, log) as server:
        try:
            run = play(server, size)
        except (OpenAIError, OSError) as error:
            raise server.failure(f"the server failed on a request: {error}") from error
    answers_file(tier).write_text(json.dumps(run.answers, indent=1))
    return run


def answers_file(tier: bool) -> Path:
    """Where the answers of a run lie."""
    return OUT / f"answers-{'on' if tier else 'off'}.json"


def check(off: Run, on: Run) -> None:
    """Raise unless the tier loaded something and changed no answer."""
    pairs = zip(off.answers, on.answers, strict=True)
    differing = [number for number, (a, b) in enumerate(pairs, 1) if a != b]
    if differing:
        raise DemoError(
            f"{len(differing)} of {len(off.answers)} answers differ with the tier on,"
            f" first that of request {differing[0]}"
            f" (compare {answers_file(tier=False)} and {answers_file(tier=True)})"
        )
    if not on.loaded_tokens:
        raise DemoError("the tier loaded no tokens from CPU memory")


def demo() -> None:
    """The whole demonstration."""
    OUT.mkdir(exist_ok=True)
    size = settings()
    print(f"Demonstration on the {size.device}: {size.conversations} chats of {size.turns} turns")
    ensure_model(OUT / "model", size)
    runs = {OFF: serve_and_play(size, tier=False), ON: serve_and_play(size, tier=True)}
    print(f"\n{table(runs)}\n")
    picture = OUT / "ttft.png"
    draw(runs, size, picture)
    print(f"Picture: {picture.resolve()}")
    check(runs[OFF], runs[ON])
    print(f"All {len(runs[OFF].answers)} answers are the same with the tier off and on.")


def main() -> int:
    """Read the (empty) command line and turn errors into one sentence."""
    argparse.ArgumentParser(prog="scripts/demo", description=__doc__).parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        demo()
    except DemoError as error:
        print(f"error: {error}.", file=sys.stderr)
        return 1
    except OSError as error:
        found = f"{error.filename or OUT}: {error.strerror}"
        print(f"error: {found} (all that this writes goes to {OUT}).", file=sys.stderr)
        return 1
    except ServerFailed as error:  # lines of its log end it
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
