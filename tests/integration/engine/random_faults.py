"""Random runs in which a function of the tier raises, once, wherever the engine calls it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any

# Where what runs on the scheduler's side is.
_PACKAGES = (
    "kvoffload_patch.tier",
    "kvoffload_patch.integration.engine.adapters",
    "kvoffload_patch.integration.engine.blocks",
    "kvoffload_patch.integration.engine.reports",
    "kvoffload_patch.integration.engine.requests",
)
_MODULES = ("kvoffload_patch.integration.engine.tier",)
_HOOKS = {f"kvoffload_patch.integration.engine.{name}" for name in ("breaker", "step_hooks")}
# What stands for a function of vLLM's and guards what it does within, and what looks a name up
# where vLLM needs the answer.
_EXEMPT = {
    "SchedulerView": {"is_parked"},
    "PrefixLookup": {"_find"},
    "PartKeys": {"_cache"},
}


class Made(RuntimeError):
    """The failure."""


@cache
def functions() -> tuple[tuple[type, str], ...]:
    """Every function of every class there, but for those that are exempt: (class, name)."""
    modules = [importlib.import_module(name) for name in _MODULES]
    for package in map(importlib.import_module, _PACKAGES):
        found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        modules += [importlib.import_module(one.name) for one in found]
    classes = [
        kind
        for module in modules
        for kind in vars(module).values()
        if inspect.isclass(kind) and kind.__module__ == module.__name__
    ]
    return _functions_of(classes)


@cache
def elastic_functions() -> tuple[tuple[type, str], ...]:
    """Those of the classes that an engine beside kvcached has in their place or besides."""
    from kvoffload_patch.integration.engine.adapters import elastic_pool
    from kvoffload_patch.integration.engine.elastic_tier import ElasticTier

    return _functions_of([ElasticTier, elastic_pool.TransferRefs, elastic_pool.ElasticPoolAdapter])


def _functions_of(classes: Iterable[type]) -> tuple[tuple[type, str], ...]:
    return tuple(
        (kind, name)
        for kind in classes
        for name, function in vars(kind).items()
        if isinstance(function, FunctionType) and not name.startswith("__")
        if not inspect.isgeneratorfunction(function)
        if name not in _EXEMPT.get(kind.__name__, ())
    )


@contextmanager
def fault(
    rng: random.Random, among: Sequence[tuple[type, str]] | None = None
) -> Iterator[list[str]]:
    """One of ``among``, or of all, raises at one of its calls, before or after its work.

    Yields:
        A list, which then says which one it was.
    """
    kind, name = rng.choice(functions() if among is None else among)
    nth, after = rng.choice([1, 1, 2, 3, 10, 50]), rng.random() < 0.5
    as_made, calls, raised = getattr(kind, name), [0], list[str]()

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] < nth or raised or not _by_the_engine():
            return as_made(*args, **kwargs)
        raised.append(f"{kind.__name__}.{name}")
        if after:
            as_made(*args, **kwargs)
        raise Made(f"{kind.__name__}.{name} is made to fail")

    setattr(kind, name, call)
    try:
        yield raised
    finally:
        setattr(kind, name, as_made)


def _by_the_engine() -> bool:
    """Whether a hook has called, and not a test that looks at the tier, nor what makes one."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_globals["__name__"] in _HOOKS and frame.f_code.co_name != "__init__":
            return True
        frame = frame.f_back
    return False


def run(seed: int, most_in_flight: int = 6) -> str:
    """One random run, in which the tier may fail; returns which function did, or nothing.

    Raises:
        AssertionError: a token is wrong, a request does not come to its end, or something stays.
        Made: the failure has reached vLLM.
    """
    from integration.engine import random_runs
    from integration.engine.random_users import Users
    from scheduler_half.scenarios import nothing_held

    rng, users = random.Random(seed), Users(seed)
    with fault(random.Random(f"faults {seed}")) as raised:
        mini = _mini(seed, users.settings(random_runs.describe(seed, most_in_flight), True))
        commands = random.Random(f"commands {seed}") if seed % 4 == 0 else None
        random_runs._play(mini, rng, users, commands, _Beside(mini, seed), None)
        mini.run(steps=random_runs._MAX_STEPS)
        mini.abort("nobody")  # a hook, which acts upon what the last step has noted
    users.check(mini, ended=mini.breaker.detached)
    mini.check()
    assert mini.breaker.detached == bool(raised) or not mini.breaker.failure, raised
    if not mini.breaker.detached:
        nothing_held(mini)
        return ""
    mini.settle()
    assert "is made to fail" in mini.breaker.failure, mini.breaker.failure
    free = mini.pool.get_num_free_blocks()
    assert free == len(mini.pool.blocks) - 1, f"{raised}: GPU blocks were lost"
    assert mini.changed() == mini.before, raised
    return raised[0]


def run_elastic(seed: int) -> str:
    """The same beside a stand-in for kvcached's pool, where a function of its classes may fail.

    Raises:
        AssertionError: a token is wrong, a request does not come to its end, or something stays.
        Made: the failure has reached vLLM.
    """
    from scheduler_half.elastic_mini import ElasticMini
    from scheduler_half.scenarios import talk

    rng = random.Random(seed)
    about = {
        "load_mode": rng.choice(["auto", "parked", "inline", "inline"]),
        "late": rng.randrange(4), "in_flight": rng.choice([1, 1, 2, 3]),
        "blocks": rng.choice([25, 33, 49, 81]), "num_slots": rng.choice([20, 60, 400]),
        "limit": rng.choice([0, 5, 10, 40, -1]), "kept": rng.choice([0, 0, 2]),
        "step_ms": rng.choice([0, 3, 30]),
    }  # fmt: skip
    with fault(random.Random(f"faults {seed}"), elastic_functions()) as raised:
        mini = ElasticMini(**about)
        talk(mini, seed, turns=3, talks=6)
        mini.abort("nobody")  # a hook, which acts upon what the last step has noted
    assert mini.breaker.detached == bool(raised), raised
    if mini.breaker.detached:
        mini.settle()
        used = [b.block_id for b in mini.pool.blocks if b.ref_cnt and not b.is_null]
        assert not used, f"{raised}: GPU blocks were lost"
    return "".join(raised)


def _mini(seed: int, about: dict[str, Any]) -> Any:
    """An engine whose copies do not fail: what is promised comes, also when the tier does not."""
    from integration.engine.mini import FakeRanks, Mini

    ranks = FakeRanks(random.Random(f"ranks {seed}").choice([0.1, 1.0, 15.0, 60.0]))
    mini = Mini(ranks=ranks, events=seed % 3 == 0, weighs=seed % 5 == 0, **about)
    # What a tier tells last that fails meanwhile may be wrong; nobody listens.
    mini.replay = None
    mini.scheduler.kv_event_publisher = SimpleNamespace(publish=lambda _: None)
    return mini


class _Beside:
    """What else comes to an engine: sleep, new weights, and resets; until the tier has failed."""

    def __init__(self, mini: Any, seed: int) -> None:
        from integration.engine.trainer import Trainer

        self._mini = mini
        self._trainer: Callable[[], object] = Trainer(mini, seed).disturb

    def disturb(self) -> None:
        """Perhaps do something, between two steps."""
        if not self._mini.breaker.detached:
            self._trainer()
