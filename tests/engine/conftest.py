"""Engines shared by the tests of this folder: each is started once, plays, and is gone."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from pathlib import Path

import pytest
from engine import engines, model, report, ways


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `scripts/matrix` asks for."""
    parser.addoption("--engine-report", type=Path, help="write what was played to this file")
    parser.addoption("--features", action="store_true", help="those marked `features` as well")


def pytest_configure(config: pytest.Config) -> None:
    """The tests that are run on every supported release."""
    config.addinivalue_line("markers", "matrix: run on every supported vLLM by `matrix engines`")
    config.addinivalue_line("markers", "features: run by `scripts/matrix features`, or --features")
    file = config.getoption("--engine-report", None)
    if file is not None:
        config.pluginmanager.register(report.Reporter(file))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Everything here starts a real vLLM, and what only widens what was shown is left out."""
    if not config.getoption("--features", False):
        left_out = [item for item in items if item.get_closest_marker("features")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    here = str(Path(__file__).parent)
    missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.engine)
            if missing:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))


class Engines:
    """Starts engines on the tiny model; the same arguments give the same run."""

    def __init__(self, folder: Path, shared: Path) -> None:
        self._folder, self._shared = folder, shared
        self.model = str(model.write_model(folder / "model"))
        self.windows = str(model.write_model(folder / "windows", window=2 * model.CHUNK))
        self.one_kv_head = str(model.write_model(folder / "one_kv_head", kv_heads=1))
        self.loras = [str(model.write_lora(folder / f"lora{i}", seed=i)) for i in (1, 2)]
        self._run = lru_cache(maxsize=None)(self._run_once)
        self.architecture = lru_cache(maxsize=None)(self._write_architecture)
        self.warm = engines.WarmProcesses(shared)

    def _write_architecture(self, kind: str) -> str:
        """A model of another architecture than Llama's."""
        from engine import architectures, linear_attention

        if kind == linear_attention.KIND:
            return str(linear_attention.write(self._folder / "linear", latent=False))
        fewer = architectures.FEWER_LAYERS.get(kind, {})
        return str(architectures.write(kind, self._folder / kind, **fewer))

    @cached_property
    def narrow(self) -> str:
        """A model every second layer of which looks back 64 tokens only."""
        return str(model.write_model(self._folder / "narrow", window=64))

    def llava(self, window: int = 0) -> str:
        """A model that sees images."""
        from engine import images

        return str(images.write(self._folder / f"llava{window}", window))

    def drafts(self, window: int = 0) -> dict[str, str]:
        """A model whose next token can be guessed, and models that draft for it."""
        from engine import drafts

        return drafts.write(self._folder / f"drafts{window}", window=window)

    def guessable_states(self) -> str:
        """A model half of whose layers keep a state, and that drafts for itself."""
        from engine import drafts

        return str(drafts.write_states(self._folder / "guessable_states"))

    def close(self) -> None:
        """End the processes that engines were forked from."""
        self.warm.close()

    def off(
        self, scenarios: list[str], engine: dict | None = None, fresh: bool = False, **env: str
    ) -> engines.Run:
        """Plain vLLM."""
        asked = (tuple(scenarios), _items(engine), None, 0, _items(env), "command", fresh)
        return self._run(*asked)

    def off_for_all(self, scenarios: list[str]) -> engines.Run:
        """The same; of the workers of pytest-xdist one plays them."""
        file = self._shared / "plain-run.json"
        with (self._shared / "plain-run.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                file.write_text(json.dumps(vars(self.off(scenarios))))
        return engines.Run(**json.loads(file.read_text()))

    def on(
        self,
        scenarios: list[str],
        engine: dict | None = None,
        tier: dict | None = None,
        late: int | str = 0,
        way: str = "command",
        fresh: bool = False,
        **env: str,
    ) -> engines.Run:
        """vLLM with the tier; ``fresh``: through the whole command, in a process of its own."""
        asked = (tuple(scenarios), _items(engine), _items(tier), late, _items(env), way, fresh)
        run = self._run(*asked)
        if ways.chosen():
            ways.note(run.log)
        return run

    def _run_once(
        self,
        scenarios: tuple,
        engine: tuple,
        tier: tuple | None,
        late: int | str,
        env: tuple,
        way: str = "command",
        fresh: bool = False,
    ) -> engines.Run:
        arguments = {"model": self.model, **dict(engine)}
        switches = None if tier is None else dict(tier)
        warm = None if fresh else self.warm
        run = engines.run(list(scenarios), arguments, switches, late, way, warm, **dict(env))
        report.add_run(run, tiered=tier is not None)
        return run


def _items(mapping: dict | None) -> tuple:
    return tuple(sorted((mapping or {}).items()))


@pytest.fixture(autouse=True)
def _how_it_was_played(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> Iterator[None]:
    """In a chosen way: how engines with the tier have run, a fixture's for each of its tests."""
    yield
    if not ways.chosen():
        return
    for value in request.node.funcargs.values():
        if isinstance(value, engines.Run) and value.tiered:
            ways.note(value.log)
    record_property("ways", json.dumps(ways.taken()))


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Real engines on a tiny model."""
    base = tmp_path_factory.getbasetemp()  # each worker of pytest-xdist has one in the same folder
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    made = Engines(tmp_path_factory.mktemp("engines"), shared)
    yield made
    made.close()


@pytest.fixture(scope="session")
def plain(real: Engines) -> engines.Run:
    """Plain vLLM's answers to what several tests play."""
    return real.off_for_all(engines.SHARED)
