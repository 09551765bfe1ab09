"""Servers that are forked from a warm process, which look like those of `scripts.soak`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.engines import WarmProcesses

from scripts.soak import server


class Server(server.Server):
    """One server on the tiny model.

    Args:
        warm: what it is forked from.
        model: folder of the model.
        log: file for what it prints.
        env: its variables, besides those of the process that it is forked from.
        ranks: tensor-parallel ranks, each a process if there are several.
    """

    def __init__(
        self, warm: WarmProcesses, model: Path, log: Path, env: dict[str, str], ranks: int = 1
    ) -> None:
        self._warm, self._file, self._variables = warm, log, env
        super().__init__(model, log, {}, {}, ranks)
        begin = self._command.index("serve")
        self._argv = self._command[begin:]

    def start(self) -> None:
        """Start it, and return at once."""
        forked: Any = self._warm.start_server(self._argv, self._variables, self._file)
        self._process = forked
