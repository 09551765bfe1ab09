"""vLLM's command line with faults in the tier's copies: python -m scripts.soak.faulty serve ...

Nothing of the package knows of them: its modules are changed here, in every process that begins
with this module, vLLM's spawned ones among them. SOAK_FAULTS is JSON: seconds between two faults of
a kind on average (``flips``: a bit of a slot changes; ``raises``: a copy is refused; ``hangs``: a
copy takes `HANG_S`), and ``log``, the file that gets a line for each.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from kvoffload_patch.threads import JoinedThread

# None in the beginning: the canary and the measuring of copies are no part of it.
QUIET_S = 20.0
HANG_S = 2.0
# Between looks whether a bit is due to change.
FLIPS_PERIOD_S = 0.2


class Faults:
    """When each kind is due.

    Args:
        every: seconds between two of a kind, on average.
        log: gets a line for each.
    """

    def __init__(self, every: dict[str, float], log: str) -> None:
        self.every = {kind: seconds for kind, seconds in every.items() if seconds > 0}
        self._log = log
        self._random = random.Random(os.getpid())
        begin = time.monotonic() + QUIET_S
        self._next = dict.fromkeys(self.every, begin)
        self._over = threading.Event()
        self._flipping: list[JoinedThread] = []

    def due(self, kind: str) -> bool:
        """Whether there is to be one of these now; it is noted then."""
        now = time.monotonic()
        if kind not in self.every or now < self._next[kind]:
            return False
        self._next[kind] = now + self.every[kind] * self._random.uniform(0.5, 1.5)
        with open(self._log, "a") as log:
            print(kind, file=log)
        return True

    def copy(self, copy: Callable[..., Any], *args: Any) -> Any:
        """Make a copy, or not, or later."""
        if self.due("raises"):
            raise OSError("the soak lets this copy fail")
        if self.due("hangs"):
            time.sleep(HANG_S)
        return copy(*args)

    def begin_flipping(self, slots: Any) -> None:
        """Change bits of slots (``uint8 [slots, bytes]``), on a thread, until `stop`."""
        thread = JoinedThread(self._flip, "soak-flips", self._over.set, (slots,))
        self._flipping.append(thread)
        thread.start()

    def stop(self) -> None:
        """Return when no bits change any more."""
        self._over.set()
        for thread in self._flipping:
            thread.join()

    def _flip(self, slots: Any) -> None:
        while not self._over.wait(FLIPS_PERIOD_S):
            if self.due("flips"):
                slot, byte = (self._random.randrange(size) for size in slots.shape)
                slots[slot, byte] ^= 1 << self._random.randrange(8)


def install(faults: Faults) -> None:
    """Copies of this process have these faults from now on."""
    from kvoffload_patch.transfer import engine as copy_engine
    from kvoffload_patch.transfer.backends.slots import SlotMemory

    copies_of, init = copy_engine.copies_of, SlotMemory.__init__

    def faulty_copies(backend: Any) -> dict[Any, Any]:
        made = copies_of(backend)
        return {link: partial(faults.copy, copy) for link, copy in made.items()}

    def faulty_slots(self: Any, slots: Any, *args: Any) -> None:
        init(self, slots, *args)
        if "flips" in faults.every:
            faults.begin_flipping(slots)

    copy_engine.copies_of = faulty_copies
    SlotMemory.__init__ = faulty_slots  # type: ignore[method-assign]


def main() -> None:
    """vLLM's own command line."""
    from vllm.entrypoints.cli.main import main as vllm

    vllm()


if "SOAK_FAULTS" in os.environ:
    _asked = json.loads(os.environ["SOAK_FAULTS"])
    install(Faults({k: v for k, v in _asked.items() if k != "log"}, _asked["log"]))

if __name__ == "__main__":
    main()
