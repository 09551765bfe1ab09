"""Attaching is all or nothing: whatever fails is a sentence, and vLLM's objects are as before."""

from __future__ import annotations

import contextlib
import queue
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import cloudpickle
from integration.engine.mini import Mini

from kvoffload_patch import __version__
from kvoffload_patch.config import STORES, Settings
from kvoffload_patch.integration import install
from kvoffload_patch.integration.engine import attach as attach_module
from kvoffload_patch.integration.engine import hooks
from kvoffload_patch.integration.engine.adapters import vllm_scheduler
from kvoffload_patch.integration.engine.adapters.vllm_scheduler import SchedulerView
from kvoffload_patch.integration.engine.adapters.vllm_stats import PrefixStats
from kvoffload_patch.integration.engine.attach import attach, detach
from kvoffload_patch.integration.engine.breaker import Breaker
from kvoffload_patch.integration.engine.ranks import workers
from kvoffload_patch.integration.engine.tier import SchedulerTier
from kvoffload_patch.integration.errors import TierRefused
from kvoffload_patch.integration.protocol import TIER, RankGeometry, RankOpened
from kvoffload_patch.integration.worker import rpc
from kvoffload_patch.patching import ObjectHooks
from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.policies import POLICIES
from kvoffload_patch.tier.policies.own import PolicyRefused

RANK = RankGeometry(0, "a", 1, 512, 512, 24, "cpu", 1 << 40, 8 << 30, version=__version__)
OPENED = RankOpened(0, 1, 100, False, 0.5, "by hand")


class Executor:
    """One rank, which answers; the call that ``fails`` names does not.

    Attributes:
        open: whether the rank has memory for a tier.
    """

    def __init__(self, fails: str = "", how: BaseException | None = None) -> None:
        self.fails, self.how = fails, how
        self.calls: list[str] = []
        self.told: dict[str, tuple[Any, ...]] = {}
        self.open = False

    def collective_rpc(self, function: Any, timeout: float, args: tuple[Any, ...]) -> list[Any]:
        name = function.__name__
        self.calls.append(name)
        self.told[name] = args
        self.open = (self.open or name == "open_rank") and name != "close_rank"
        if name == self.fails:
            if self.how is not None:
                raise self.how
            return [(False, "OSError: made to fail")]
        answers = {"describe_rank": RANK, "open_rank": OPENED}
        return [(True, answers.get(name))]


@pytest.fixture(autouse=True, scope="module")
def _compared_once() -> Iterator[None]:
    """Installed files do not change between tests, and reading all of them takes a second."""
    decide = install._decide_vllm
    known: dict[str, Any] = {}

    def decide_once(settings: Settings) -> Any:
        asked = repr((settings.vllm_version, settings.allow_unverified))
        if asked not in known:
            known[asked] = decide(settings)
        return known[asked]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(install, "_decide_vllm", decide_once)
        yield


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The errors that are logged, with strict off."""
    monkeypatch.setenv("KVOFFLOAD_STRICT", "0")
    texts: list[str] = []
    monkeypatch.setattr(attach_module.logger, "error", lambda t, *a, **_: texts.append(t % a))
    return texts


def engine(mini: Mini, executor: Executor) -> Any:
    return SimpleNamespace(scheduler=mini.scheduler, model_executor=executor, batch_queue=None)


def untouched(mini: Mini, before: dict[str, Any], executor: Executor) -> None:
    """The scheduler is as vLLM made it, and serves."""
    assert mini.changed() == before and not executor.open
    mini.add(list(range(100, 140)))
    mini.run()
    mini.check()


def test_a_tier_is_attached_once_and_detached() -> None:
    mini, executor = Mini(tier=False), Executor()
    before, core = mini.changed(), engine(mini, executor)
    attach(core, mini.config)
    breaker = getattr(mini.scheduler, TIER)
    assert isinstance(breaker, Breaker) and "schedule" in vars(mini.scheduler)
    calls = list(executor.calls)
    attach(core, mini.config)
    assert getattr(mini.scheduler, TIER) is breaker and executor.calls == calls
    detach(core)
    assert mini.changed() == before
    detach(core)
    detach(SimpleNamespace())


@pytest.mark.parametrize("part", ["socket", "tier"])
@pytest.mark.parametrize(
    "how", [OSError("made to fail"), KeyboardInterrupt()], ids=["error", "key"]
)
def test_what_fails_at_the_end_keeps_nothing_else_from_ending(
    part: str, how: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own shutdown ends its workers; the tier's gives its memory back."""
    mini, executor = Mini(tier=False), Executor()
    executor.driver_worker = object()  # type: ignore[attr-defined]
    before, core, ended = mini.changed(), engine(mini, executor), list[str]()
    attach(core, mini.config)

    def fail(*_: Any) -> None:
        raise how

    where = {"socket": (attach_module.control, "close_socket"), "tier": (SchedulerTier, "close")}
    monkeypatch.setattr(*where[part], fail)
    warned: list[str] = []
    monkeypatch.setattr(hooks.logger, "warning", lambda text, *a: warned.append(text % a))
    key = isinstance(how, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt) if key else contextlib.nullcontext():
        hooks.shutdown(lambda: ended.append("vLLM"), core, (), {})
    assert ended == ["vLLM"] and TIER not in vars(mini.scheduler)
    if part == "socket":
        assert not executor.open and mini.changed() == before
    assert key or "not closed in order (made to fail" in warned[0]


@pytest.mark.parametrize(("fails", "state"), [("", "on"), ("open_rank", "refused")])
def test_the_front_end_is_told_of_a_tier_and_of_a_refusal(
    fails: str, state: str, log: list[str]
) -> None:
    mini = Mini(tier=False)
    core = engine(mini, Executor(fails))
    core.output_queue = queue.Queue()
    core.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(served_model_name="m"), parallel_config=SimpleNamespace()
    )
    attach(core, mini.config)
    _, outputs = core.output_queue.get_nowait()
    sent = outputs.scheduler_stats.kvoffload["values"]
    found = {(name, *labels): value for name, labels, value in sent}
    assert found["tier_state", state] == 1
    assert fails or found["capacity_bytes",] == OPENED.num_ready * RANK.block_bytes
    detach(core)


@pytest.mark.parametrize("whose", ["vLLM's", "the user's"])
def test_a_rank_in_the_process_of_the_engine_may_end_that_if_it_is_vllms_own(whose: str) -> None:
    mini, executor = Mini(tier=False), Executor()
    executor.driver_worker = object()  # type: ignore[attr-defined]
    core = engine(mini, executor)
    if whose == "vLLM's":
        core.output_queue = queue.Queue()
        core.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(served_model_name="m"), parallel_config=SimpleNamespace()
        )
    attach(core, mini.config)
    end = executor.told["open_rank"][-1]
    detach(core)
    assert callable(end) == (whose == "vLLM's")


def test_what_nobody_has_run_and_the_user_allows_is_said_in_the_log_and_by_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(attach_module.logger, "warning", lambda t, *a, **_: warned.append(t % a))
    told: list[Any] = []
    monkeypatch.setattr(attach_module.control, "listen", lambda *args: told.append(args[-1]))
    monkeypatch.setenv("KVOFFLOAD_CONTROL", "1")
    for allowed in ("1", "0"):
        monkeypatch.setenv("KVOFFLOAD_ALLOW_UNVERIFIED", allowed)
        mini = Mini(tier=False)
        core = engine(mini, Executor())
        if allowed == "1":
            mini.config.parallel_config.prefill_context_parallel_size = 2
        attach(core, mini.config)
        detach(core)
    (doubt,), nothing = told
    assert "prefill_context_parallel_size 1" in doubt and nothing == ()
    (warning,) = [text for text in warned if "ALLOW_UNVERIFIED uses" in text]
    assert doubt in warning and warning.endswith("compare its answers with those without it.")


@pytest.mark.parametrize(
    ("local", "engines", "gib", "said"),
    [(1, 1, "0.1", 1), (0, 1, "0.1", 0), (None, 1, "0.1", 0), (1, 2, "0.1", 0), (1, 1, "auto", 0)],
)
def test_engines_that_each_take_the_size_of_the_whole_server_are_told(
    local: int | None, engines: int, gib: str, said: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(attach_module.logger, "warning", lambda t, *a, **_: warned.append(t % a))
    monkeypatch.setenv("KVOFFLOAD_CPU_GIB", gib)
    mini = Mini(tier=False)
    core, parallel = engine(mini, Executor()), mini.config.parallel_config
    parallel.data_parallel_rank_local, parallel.data_parallel_size = local, engines
    attach(core, mini.config)
    detach(core)
    assert sum("divide KVOFFLOAD_CPU_GIB by their number" in text for text in warned) == said


@pytest.mark.parametrize(("options", "name"), [("", "KVOFFLOAD_CPU_GIB"), (None, "--cpu-gib")])
def test_a_refusal_names_the_option_where_one_was_given(
    options: str | None, name: str, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVOFFLOAD_CPU_GIB", "60000")
    monkeypatch.setenv("KVOFFLOAD_OPTIONS", "KVOFFLOAD_CPU_GIB" if options is None else options)
    mini = Mini(tier=False)
    attach(engine(mini, Executor()), mini.config)
    assert len(log) == 1 and f"lower {name}, or free memory" in log[0]


@pytest.mark.parametrize(
    ("module", "refused"), [("ray_executor", True), ("ray_executor_v2", False)]
)
def test_slots_are_not_overwritten_beside_steps(
    module: str, refused: bool, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that was sent before may load from them."""
    monkeypatch.setenv("KVOFFLOAD_WIPE", "1")
    mini = Mini(tier=False)
    kind = type("Own", (Executor,), {"__module__": f"vllm.v1.executor.{module}"})
    core = engine(mini, kind())
    attach(core, mini.config)
    assert [
        text for text in log if "KVOFFLOAD_WIPE=1 needs, found Ray's compiled graph" in text
    ] == log
    assert bool(log) == refused
    detach(core)


# What fails: (object, name of a function on it). Everything of ours that runs at attach.
FAILING = {
    "settings": (attach_module.Settings, "from_env"),
    "eligibility": (attach_module, "check_eligible"),
    "points": (attach_module, "step_hooks"),
    "size": (attach_module, "engine_bytes"),
    "view": (SchedulerView, "__init__"),
    "statistics": (PrefixStats, "enable"),
    "manager": (OffloadManager, "__init__"),
    "tier": (SchedulerTier, "__init__"),
    "breaker": (Breaker, "__init__"),
    "hooks": (ObjectHooks, "install"),
    "board": (workers, "check_size"),
}


@pytest.mark.parametrize("what", FAILING)
@pytest.mark.parametrize("strict", [False, True])
def test_whatever_raises_is_a_refusal(
    what: str, strict: bool, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mini, executor = Mini(tier=False), Executor()
    before = mini.changed()
    monkeypatch.setenv("KVOFFLOAD_STRICT", str(int(strict)))
    told: list[str] = []
    monkeypatch.setattr(attach_module.launch_token, "tell", told.append)
    owner, name = FAILING[what]

    def fail(*_: Any, **__: Any) -> None:
        raise AttributeError("something\nthat has another name")

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, fail)
        if strict:
            with pytest.raises(TierRefused, match="found AttributeError") as refusal:
                attach(engine(mini, executor), mini.config)
            text = str(refusal.value)
            assert told == [text], "the launch says it last"
        else:
            attach(engine(mini, executor), mini.config)
            (text,) = log
            assert told == []
            assert text.endswith("Serving without the CPU tier.")
    assert "(something that has another name); report it" in text and "\n" not in text
    assert "open_rank" not in executor.calls, "memory was taken before this was tried"
    untouched(mini, before, executor)


@pytest.mark.parametrize("strict", [False, True])
def test_what_an_import_was_refused_with_is_not_said_again(
    strict: bool, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's `__init__` was hooked when it was called, and nothing is any more."""
    mini, executor = Mini(tier=False), Executor()
    before = mini.changed()
    monkeypatch.setenv("KVOFFLOAD_STRICT", str(int(strict)))
    monkeypatch.setattr(attach_module, "keep_installed", lambda: "the runner was replaced.")
    confirmed: list[str] = []
    monkeypatch.setattr(attach_module.launch_token, "confirm", confirmed.append)
    core = engine(mini, executor)
    core.output_queue = queue.Queue()
    core.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(served_model_name="m"), parallel_config=SimpleNamespace()
    )
    if strict:
        with pytest.raises(TierRefused, match="the runner was replaced"):
            attach(core, mini.config)
    else:
        attach(core, mini.config)
        sent = core.output_queue.get_nowait()[1].scheduler_stats.kvoffload["values"]
        assert ("tier_off_info", ("the runner was replaced.",), 1) in [
            (name, tuple(labels), value) for name, labels, value in sent
        ]
        assert confirmed == [attach_module.launch_token.ATTACHED]
    assert log == [] and executor.calls == ["close_rank"], "memory was taken in advance"
    untouched(mini, before, executor)


def test_variables_that_cannot_be_passed_on_end_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("environment")

    seen: list[str] = []
    monkeypatch.setattr(hooks, "pass_variables_on", fail)
    monkeypatch.setattr(hooks, "attach", lambda *_: seen.append("attached"))
    core = SimpleNamespace(vllm_config=None)
    hooks.init(lambda *_: seen.append("started"), core, (None, object), {})
    assert seen == ["started", "attached"]


@pytest.mark.parametrize("nth", [2])
@pytest.mark.parametrize("what", ["view", "tier", "breaker", "hooks", "manager"])
def test_what_fails_only_when_the_ranks_are_open_closes_them(
    what: str, nth: int, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mini, executor = Mini(tier=False), Executor()
    before = mini.changed()
    owner, name = FAILING[what]
    as_made, calls = getattr(owner, name), []

    def fail_later(*args: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == nth:
            raise AttributeError("only now")
        return as_made(*args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, fail_later)
        attach(engine(mini, executor), mini.config)
    assert executor.calls[-1] == "close_rank" and "open_rank" in executor.calls
    assert len(log) == 1 and "(only now)" in log[0]
    untouched(mini, before, executor)


@pytest.mark.parametrize("call", ["describe_rank", "open_rank"])
@pytest.mark.parametrize("how", [None, RuntimeError("worker died"), TimeoutError("too late")])
def test_a_worker_that_fails_or_is_silent_is_a_refusal(
    call: str, how: Exception | None, log: list[str]
) -> None:
    mini, executor = Mini(tier=False), Executor(call, how)
    silent = isinstance(how, TimeoutError)
    executor.driver_worker = None
    before = mini.changed()
    attach(engine(mini, executor), mini.config)
    (text,) = log
    assert re.search(f"expected every worker to answer {call}, found", text)
    assert ("close_rank" in executor.calls) != silent, "it is not waited for again"
    executor.open = executor.open and not silent
    untouched(mini, before, executor)


def test_a_worker_that_vllm_may_hear_late_is_refused_whatever_is_asked_for(log: list[str]) -> None:
    mini, executor = Mini(tier=False), Executor("open_rank", TimeoutError("too late"))
    before = mini.changed()
    with pytest.raises(TierRefused, match="whose late answer vLLM would take for that to a call"):
        attach(engine(mini, executor), mini.config)
    assert executor.calls[-1] == "open_rank" and not log and mini.changed() == before
    executor.how = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        attach(engine(mini, executor), mini.config)
    assert executor.calls[-1] == "open_rank" and mini.changed() == before


def test_a_scheduler_whose_lookup_is_replaced_is_refused(log: list[str]) -> None:
    mini, executor = Mini(tier=False), Executor()
    coordinator = mini.kv_manager.coordinator
    search = coordinator.find_longest_cache_hit

    def others(*args: Any) -> Any:
        return search(*args)

    coordinator.find_longest_cache_hit = others
    attach(engine(mini, executor), mini.config)
    assert "found one set by others" in log[0]
    assert vars(coordinator)["find_longest_cache_hit"] == others


def test_an_interrupt_gives_back_what_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    mini, executor = Mini(tier=False), Executor()
    before = mini.changed()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(attach_module, "OffloadManager", lambda *a, growing=None: interrupt())
        patched.setattr(attach_module, "_rehearse", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            attach(engine(mini, executor), mini.config)
    assert executor.calls[-1] == "close_rank"
    untouched(mini, before, executor)


def test_what_is_sent_to_a_worker_needs_nothing_of_ours_to_be_read() -> None:
    """Where the package is not installed, the worker answers so instead of raising."""
    sent = cloudpickle.dumps(rpc.answering(rpc.describe_rank)).replace(
        b"kvoffload_patch.integration.worker.rpc", b"kvoffload_patch.integration.worker.xyz"
    )
    done, text = cloudpickle.loads(sent)(SimpleNamespace())
    assert not done and text.startswith("ModuleNotFoundError: No module named")
    done, text = rpc.answering(rpc.drain_rank)(SimpleNamespace())
    assert not done and text.startswith("AttributeError: ")


def test_a_policy_of_a_users_own_that_is_none_is_no_fault_to_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sentence = "expected an eviction policy behind a:B, found none; correct it."

    def refuse(name: str) -> None:
        raise PolicyRefused(sentence)

    monkeypatch.setattr(attach_module, "policy_named", refuse)
    mini = Mini(tier=False)
    with pytest.raises(TierRefused) as refusal:
        attach(engine(mini, Executor()), mini.config)
    assert str(refusal.value) == f"kvoffload_patch: {sentence}"


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("eviction", POLICIES)
def test_blocks_are_stored_and_evicted_by_the_policies_that_were_chosen(
    eviction: str, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVOFFLOAD_EVICTION", eviction)
    monkeypatch.setenv("KVOFFLOAD_STORE", store)
    mini = Mini(tier=False)
    core = engine(mini, Executor())
    attach(core, mini.config)
    manager = getattr(mini.scheduler, TIER).tier._manager
    assert type(manager._prefixes.policy) is POLICIES[eviction]
    assert manager.lazy is (store == "lazy")
    assert manager.offer({"a": 1}) == ({} if store == "lazy" else {"a": 1})
    weighed = getattr(manager._gain, "_gpu_blocks", None)
    assert weighed == (len(mini.pool.blocks) if store == "auto" else None)
    detach(core)


def test_nothing_is_stored_late_or_loaded_by_layer_where_blocks_lose_their_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Settings().load_by_layer and Settings().store == "auto"
    monkeypatch.setattr(attach_module, "is_elastic", lambda pool: True)
    mini = Mini(tier=False)
    core = engine(mini, Executor())
    attach(core, mini.config)
    manager = getattr(mini.scheduler, TIER).tier._manager
    assert not (manager.lazy or manager.looks_ahead) and manager._gain is None
    assert not attach_module._chosen(Settings(), mini.pool).load_by_layer
    detach(core)


@pytest.mark.parametrize("error", [AttributeError, KeyboardInterrupt])
def test_what_fails_when_the_hooks_are_set_takes_them_off(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    mini, executor = Mini(tier=False), Executor()
    before = mini.changed()

    def fails(*_: Any) -> None:
        raise error("by hand")

    with monkeypatch.context() as patched:
        patched.setattr(attach_module, "can_keep", fails)
        with pytest.raises((TierRefused, KeyboardInterrupt)):
            attach(engine(mini, executor), mini.config)
    assert executor.calls[-1] == "close_rank"
    untouched(mini, before, executor)


# What only tells of a tier that is attached: (object, name of a function on it).
TELLING = {
    "log line": (attach_module.logger, "info"),
    "doubt": (attach_module, "is_told_apart"),
    "metrics": (attach_module.metrics, "begin"),
    "socket": (attach_module.control, "listen"),
    "launch": (attach_module.launch_token, "confirm"),
}


@pytest.mark.parametrize("what", TELLING)
@pytest.mark.parametrize("strict", [False, True])
def test_a_tier_that_cannot_be_told_of_serves_on(
    what: str, strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mini, executor = Mini(tier=False), Executor()
    before, core, told_off = mini.changed(), engine(mini, executor), list[Any]()
    warned: list[str] = []
    monkeypatch.setenv("KVOFFLOAD_STRICT", str(int(strict)))
    monkeypatch.setenv("KVOFFLOAD_CPU_GIB", "0.1")
    monkeypatch.setenv("KVOFFLOAD_CONTROL", "1")
    monkeypatch.setattr(attach_module.control, "listen", lambda *_: None)
    monkeypatch.setattr(attach_module.logger, "warning", lambda t, *a, **_: warned.append(t % a))
    monkeypatch.setattr(attach_module.metrics, "tell_off", lambda *said: told_off.append(said))

    def fail(*_: Any, **__: Any) -> None:
        raise LookupError("made to fail")

    with monkeypatch.context() as patched:
        patched.setattr(*TELLING[what], fail)
        attach(core, mini.config)
    assert isinstance(getattr(mini.scheduler, TIER), Breaker) and executor.open
    assert "schedule" in vars(mini.scheduler) and told_off == []
    (text,) = [text for text in warned if "failed (LookupError: made to fail)" in text]
    assert text.endswith(" serves all the same." if what == "launch" else "CPU tier serves on.")
    detach(core)
    assert mini.changed() == before


def test_a_log_that_fails_altogether_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter that a user has set may raise."""
    mini, executor = Mini(tier=False), Executor()
    before, core = mini.changed(), engine(mini, executor)

    def fail(*_: Any) -> bool:
        raise LookupError("made to fail")

    monkeypatch.setattr(attach_module.logger, "filter", fail)
    monkeypatch.setattr(attach_module.logger, "disabled", False)
    monkeypatch.setattr(attach_module.logger, "isEnabledFor", lambda _: True)
    attach(core, mini.config)
    assert TIER in vars(mini.scheduler) and executor.open
    detach(core)
    executor.driver_worker = None  # type: ignore[attr-defined]
    executor.fails = "open_rank"
    monkeypatch.setenv("KVOFFLOAD_STRICT", "0")
    attach(core, mini.config)
    assert executor.calls[-1] == "close_rank" and mini.changed() == before


@pytest.mark.parametrize("what", TELLING)
def test_an_interrupt_while_a_tier_is_told_of_takes_it_back(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mini, executor = Mini(tier=False), Executor()
    executor.driver_worker = None  # type: ignore[attr-defined]
    before, core, closed = mini.changed(), engine(mini, executor), list[Any]()
    monkeypatch.setenv("KVOFFLOAD_CPU_GIB", "0.1")
    monkeypatch.setenv("KVOFFLOAD_CONTROL", "1")
    monkeypatch.setattr(attach_module.control, "listen", lambda *_: None)
    monkeypatch.setattr(attach_module.control, "close_socket", closed.append)

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(*TELLING[what], interrupt)
        with pytest.raises(KeyboardInterrupt):
            attach(core, mini.config)
    assert closed == [core] and TIER not in vars(mini.scheduler)
    untouched(mini, before, executor)


@pytest.mark.parametrize("strict", [False, True])
def test_what_is_installed_and_cannot_be_kept_is_a_refusal(
    strict: bool, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mini, executor = Mini(tier=False), Executor()
    before = mini.changed()
    monkeypatch.setenv("KVOFFLOAD_STRICT", str(int(strict)))

    def fail() -> str:
        raise LookupError("made to fail")

    monkeypatch.setattr(attach_module, "keep_installed", fail)
    with pytest.raises(TierRefused, match="LookupError") if strict else contextlib.nullcontext():
        attach(engine(mini, executor), mini.config)
    assert executor.calls == [] and len(log) == (not strict)
    untouched(mini, before, executor)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("when", ["rehearsed", "attached"])
def test_hooks_that_cannot_be_taken_back_end_the_start_and_memory_is_given_back(
    strict: bool, when: str, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows what vLLM's objects are like then."""
    mini, executor = Mini(tier=False), Executor()
    monkeypatch.setenv("KVOFFLOAD_STRICT", str(int(strict)))

    def fail(*_: Any) -> None:
        raise LookupError("made to fail")

    if when == "attached":
        monkeypatch.setattr(attach_module, "_rehearse", lambda *_: None)
        monkeypatch.setattr(attach_module, "can_keep", fail)
    monkeypatch.setattr(ObjectHooks, "remove", fail)
    with pytest.raises(TierRefused, match="expected vLLM's objects to be as before .*LookupError"):
        attach(engine(mini, executor), mini.config)
    assert executor.calls[-1] == "close_rank" and not executor.open and log == []
    assert mini.scheduler.connector_prefix_cache_stats is None, "the rest was undone"


def test_records_that_cannot_be_kept_leave_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    mini, executor = Mini(tier=False), Executor()
    before = mini.changed()

    class Records:
        def keep(self, _: int) -> None:
            raise LookupError("made to fail")

        def restore(self) -> None:
            """Nothing was kept."""

    with monkeypatch.context() as patched:
        patched.setattr(vllm_scheduler, "experts_of", lambda _: Records())
        with pytest.raises(TierRefused, match="made to fail"):
            attach(engine(mini, executor), mini.config)
    untouched(mini, before, executor)
