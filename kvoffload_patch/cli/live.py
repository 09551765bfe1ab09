"""The live view of `kvoffload top`; the only module here that imports rich, which may be absent."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.bar import Bar
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

SAMPLES = 30  # what an engine did in the last so many intervals
LINES = 6  # of an engine
_LEVELS = " ▁▂▃▄▅▆▇█"
_COLORS = {"on": "green", "paused": "yellow", "not_needed": "yellow"}
_GIB = 1 << 30
_END = b"qQ"


class View:
    """Running engines over time, on the whole terminal while it is entered.

    Args:
        table: all engines as a text with a line for each, for a terminal that is not high enough.
        console: where; None: standard output.
    """

    def __init__(
        self, table: Callable[[Sequence[Mapping[str, Any]]], str], console: Console | None = None
    ) -> None:
        self._table = table
        self._console = console or Console()
        self._live = Live(console=self._console, screen=True, auto_refresh=False)
        self._histories: dict[tuple[str, str], deque[float]] = defaultdict(
            lambda: deque(maxlen=SAMPLES)
        )

    def __enter__(self) -> View:
        with _undisturbed():
            self._before = signal.signal(signal.SIGTSTP, self._suspend)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        with _undisturbed():
            self._live.stop()
            signal.signal(signal.SIGTSTP, self._before)

    def __call__(self, found: Sequence[Mapping[str, Any]]) -> None:
        """Show the engines, ``rates`` included, in place of what was shown before."""
        with _undisturbed():
            self._live.update(self.rendered(found), refresh=True)

    def wait(self, seconds: float) -> bool:
        """Sleep for so long, or until q is typed; whether it was."""
        until = time.monotonic() + seconds
        with _typed_at_once() as terminal:
            while terminal is not None and (left := until - time.monotonic()) > 0:
                if not select.select([terminal], [], [], left)[0]:
                    return False
                if not (typed := os.read(terminal, 1)):
                    break
                if typed in _END:
                    return True
        time.sleep(max(0.0, until - time.monotonic()))
        return False

    def _suspend(self, *_: object) -> None:
        """Ctrl-Z: leave the terminal to the shell, and take it again when this goes on."""
        self._live.stop()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._live.start(refresh=True)

    def rendered(self, found: Sequence[Mapping[str, Any]]) -> Group:
        """Everything that is shown."""
        head = Text(f"{time.strftime('%H:%M:%S')}  kvoffload top, q ends it", style="bold")
        if not found:
            return Group(head, Text(self._table(found)), Text("one that starts is shown"))
        blocks = [self._block(one) for one in found]
        if 1 + LINES * len(found) > self._console.height:
            return Group(head, Text(self._table(found), no_wrap=True))
        return Group(head, *blocks)

    def _block(self, one: Mapping[str, Any]) -> Group:
        if "error" in one:
            return Group(_title(one["engine"], "silent", one["error"]))
        state = one["state"] + (", growing" if one["growing"] else "")
        rows = Table.grid(padding=(0, 2))
        rows.add_column(width=9)
        rows.add_column(width=SAMPLES)
        rows.add_column(no_wrap=True)
        for row in (self._used(one), *self._rates(one), _under_way(one)):
            rows.add_row(*row)
        return Group(_title(one["engine"], state, one["reason"] or f"model {one['model']}"), rows)

    def _used(self, one: Mapping[str, Any]) -> tuple[Any, ...]:
        full = one["used_blocks"] / max(1, one["capacity_blocks"])
        words = f"{100 * full:.0f}% of {one['capacity_bytes'] / _GIB:.2f} GiB"
        return "  used", Bar(1.0, 0.0, full, color="cyan", bgcolor="bright_black"), words

    def _rates(self, one: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        now = defaultdict(float, one["rates"])
        ever = one["hit_tokens"] / max(1, one["queried_tokens"])
        hits, loads, stores = "hit_rate", "loaded_bytes_per_second", "stored_bytes_per_second"
        evicted = now["evicted_blocks_per_second"]
        words = {
            hits: f"{100 * now[hits]:.0f}% now, {100 * ever:.0f}% since it started",
            loads: f"{now[loads] / 1e6:.1f} MB/s",
            stores: f"{now[stores] / 1e6:.1f} MB/s, {evicted:.0f} blocks/s evicted",
        }
        rows = []
        for rate, label in ((hits, "  hits"), (loads, "  loads"), (stores, "  stores")):
            history = self._histories[one["engine"], rate]
            history.append(now[rate])
            drawn = levels(history, 1.0 if rate == hits else max(history))
            rows.append((label, Text(drawn.rjust(SAMPLES), style="cyan"), words[rate]))
        return rows


@contextmanager
def _typed_at_once() -> Iterator[int | None]:
    """The terminal that keys come from one by one, unseen; None if none or another job has it."""
    try:
        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
        if os.tcgetpgrp(terminal) != os.getpgrp():  # it would be stopped
            raise OSError
    except (OSError, ValueError, termios.error):
        yield None
        return
    tty.setcbreak(terminal, termios.TCSANOW)
    try:
        yield terminal
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-Z waits, so that it finds the screen as it was meant to be."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def levels(values: Sequence[float], most: float) -> str:
    """A character for each value, the higher the larger it is; `most` has the highest."""
    top = len(_LEVELS) - 1
    return "".join(
        _LEVELS[min(top, -int(-top * value // most))] if most > 0 else _LEVELS[0]
        for value in values
    )


def _title(engine: str, state: str, more: str) -> Text:
    color = _COLORS.get(state.partition(",")[0], "red")
    return Text.assemble("engine ", (engine, "bold"), ": ", (state, color), f", {more}")


def _under_way(one: Mapping[str, Any]) -> tuple[Any, ...]:
    failed = one["failed_copies"]
    copies = f"{one['queued_loads']} loads, {one['queued_stores']} stores"
    words = (f"{one['parked_requests']} parked, last step {one['seconds_since_step']:.0f} s ago, ",
             (f"{failed} failed", "red" if failed else ""))  # fmt: skip
    return "  now", copies, Text.assemble(*words)
