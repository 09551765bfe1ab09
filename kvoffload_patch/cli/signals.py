"""What a command clears up is cleared up by the signals that end it as well."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

_ENDS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ended_in_order() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit meanwhile, with the status that a shell has for them.

    One that is ignored stays so: under nohup a command outlives its terminal.
    """

    def end(number: int, _: object) -> NoReturn:
        sys.exit(128 + number)

    heard = [number for number in _ENDS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
