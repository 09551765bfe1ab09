"""What fails beside a step, or in what stands for a function of vLLM's, stays the tier's."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from integration.engine.mini import BLOCK, Mini
from scheduler_half.scenarios import free_blocks, prompt
from scheduler_half.states import STATE

from kvoffload_patch.integration.engine import breaker, hooks
from kvoffload_patch.integration.engine.adapters import vllm_pool
from kvoffload_patch.integration.errors import PromiseBroken


def fails(*_: Any, **__: Any) -> None:
    raise LookupError("it is made to fail")


def serves_on(mini: Mini) -> None:
    """The tier is detached, at the latest by the next hook, and nothing of it stays."""
    mini.add(prompt(3, seed=1), count=3)
    mini.run()
    mini.check()
    assert mini.breaker.detached and "it is made to fail" in mini.breaker.failure
    assert mini.changed() == mini.before
    assert free_blocks(mini) == len(mini.pool.blocks) - 1


@pytest.mark.parametrize("part", ["tier", "loras"])
def test_a_reset_succeeds_whatever_the_tier_makes_of_it(part: str) -> None:
    mini = Mini()
    mini.only_in_cpu(prompt(3, seed=1))
    owner, method = {
        "tier": (mini.tier, "gpu_emptied"), "loras": (mini.view.loras, "all_forgotten"),
    }[part]  # fmt: skip
    setattr(owner, method, fails)
    assert mini.scheduler.reset_prefix_cache()
    assert mini.breaker.detached, "it may hold what the reset was to forget"
    serves_on(mini)


@pytest.mark.parametrize("method", ["sleep_begins", "sleep_over"])
@pytest.mark.parametrize("later", [False, True])
def test_vllm_falls_asleep_whatever_the_tier_makes_of_it(method: str, later: bool) -> None:
    mini, slept, told = Mini(), list[int](), list[Any]()
    setattr(mini.tier.weights, method, fails)
    future = SimpleNamespace(add_done_callback=told.append) if later else None

    def sleep(level: int) -> Any:
        slept.append(level)
        return future

    core = SimpleNamespace(scheduler=mini.scheduler)
    assert hooks.sleep(sleep, core, (1,), {}) is future and slept == [1]
    for tell in told:
        tell(future)
    serves_on(mini)


def _raise_in_step(mini: Mini, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step raises and is not taken in, as where it is interrupted; who has called goes on."""
    owner, method = {
        "schedule": (mini.kv_manager, "allocate_slots"),
        "before the ranks begin": (mini.device, "step"),
        "forward pass": (mini.device, "_forward"),
    }[where]  # fmt: skip
    as_made = getattr(owner, method)

    def ends(*args: Any, **kwargs: Any) -> None:
        if where == "schedule":
            as_made(*args, **kwargs)  # keys are given, and nobody computes these blocks
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(owner, method, ends)
        with pytest.raises(KeyboardInterrupt):
            mini.step()


@pytest.mark.parametrize("where", ["schedule", "before the ranks begin", "forward pass"])
@pytest.mark.parametrize("load_mode", ["inline", "parked"])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_who_goes_on_after_a_step_that_raised_has_plain_vllm(
    where: str, load_mode: str, in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for what its plan was to load, nor has anybody what it was to store."""
    mini = Mini(load_mode=load_mode, in_flight=in_flight, blocks=30, store="eager")
    known, new = prompt(6, seed=2), prompt(3, seed=3)
    mini.only_in_cpu(known)
    for asked in (known, new):
        mini.add(asked, count=3)
    _raise_in_step(mini, where, monkeypatch)
    mini.abort()
    taken = mini.pool.get_new_blocks(mini.pool.get_num_free_blocks())
    mini.pool.free_blocks(taken)  # what has keys and was not computed is gone, as after a reset
    for _ in range(2):
        for asked in (known, new, prompt(20, seed=4)):
            mini.add(asked, count=3)
            mini.run()
    mini.check()
    assert mini.breaker.detached and "vLLM has raised within a step" in mini.breaker.failure
    assert mini.changed() == mini.before
    assert free_blocks(mini) == len(mini.pool.blocks) - 1
    assert mini.scheduler.reset_prefix_cache()


def test_a_command_behind_a_step_that_raised_finds_no_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be carried out while a plan is lost."""
    mini = Mini()
    mini.add(prompt(3, seed=1))
    _raise_in_step(mini, "forward pass", monkeypatch)
    asked = mini.ask("pause")
    mini.abort()
    mini.add(prompt(3, seed=2))
    mini.run()
    assert asked.done.is_set() and asked.error and not mini.tier.paused


def _interrupted(mini: Mini, at: int) -> bool:
    """Interrupt three steps as the at-th function of the breaker, or at the pool, begins."""
    left, files = at, (breaker.__file__, vllm_pool.__file__)

    def look(frame: Any, event: str, _: object) -> None:
        nonlocal left
        if event == "call" and frame.f_code.co_filename in files:
            left -= 1
            # Where it is between taking a block, or giving it back, and noting that, it is lost.
            if left <= 0 and frame.f_code.co_name in (*vars(breaker.Breaker), "disclaim"):
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        for _ in range(3):
            mini.step()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.parametrize("load_mode", ["inline", "parked"])
def test_who_goes_on_after_an_interrupt_between_two_parts_has_plain_vllm(load_mode: str) -> None:
    """The output of the step is lost, or half of what a hook does after it."""
    known, new = prompt(6, seed=2), prompt(3, seed=3)
    for at in range(1, 1000):
        mini = Mini(load_mode=load_mode, blocks=30, store="eager", late=2, weighs=False)
        limits = mini.changed()["values"][:2]
        mini.only_in_cpu(known)
        for asked in (known, new, prompt(9, seed=8), prompt(12, seed=9)):
            mini.add(asked, count=3)
        if not _interrupted(mini, at):
            break
        mini.abort()
        mini.add(prompt(2, seed=7), count=3)
        mini.run()
        mini.settle()
        taken = mini.pool.get_new_blocks(mini.pool.get_num_free_blocks())
        mini.pool.free_blocks(taken)
        for asked in (known, new, prompt(20, seed=4)) * 2:
            mini.add(asked, count=3)
            mini.run()
        mini.check()
        assert mini.changed()["values"][:2] == limits
        assert free_blocks(mini) == len(mini.pool.blocks) - 1 or not mini.breaker.detached
    assert 20 < at < 999


def test_what_vllm_raises_while_it_schedules_is_what_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mini = Mini()
    mini.add(prompt(3, seed=1))
    with monkeypatch.context() as patched:
        patched.setattr(mini.kv_manager, "allocate_slots", _ends)
        with pytest.raises(ZeroDivisionError):
            mini.step()
    mini.run()
    mini.check()
    assert mini.breaker.detached


def _ends(*_: Any, **__: Any) -> None:
    raise ZeroDivisionError("of vLLM's own")


@pytest.mark.parametrize("load_mode", ["inline", "parked"])
def test_vllm_searches_by_itself_where_it_cannot_be_given_what_was_found(load_mode: str) -> None:
    mini = Mini(load_mode=load_mode)
    mini.only_in_cpu(prompt(6, seed=1))
    mini.view.prefix._take_given = fails
    name = mini.add(prompt(6, seed=1))
    mini.run()
    mini.check()
    assert mini.hits[name] == 6 * BLOCK, "what was loaded for it is there"
    serves_on(mini)


def test_vllm_gives_keys_of_parts_whatever_the_tier_notes_of_them() -> None:
    mini = Mini(windows=(None, STATE), blocks=120, unit=4)
    if not mini.view.groups.parts:
        pytest.skip("this release has no hits that end within a block")
    parts = mini.view.part_keys
    assert parts is not None
    parts._keys = fails  # type: ignore[method-assign]
    for _ in range(2):
        name = mini.add(prompt(3, seed=1, tail=14), count=1)
        mini.run()
    mini.check()
    assert mini.hits[name] == 3 * BLOCK + 12
    assert mini.breaker.detached


@pytest.mark.parametrize(
    ("part", "method"),
    [
        ("_manager", "begin_load"), ("_manager", "expose_load"), ("_view", "publish"),
        ("_loads", "_give"), ("_manager", "resize"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("load_mode", ["inline", "parked"])
def test_who_goes_on_after_an_interrupt_gets_right_answers(
    load_mode: str, part: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a change of the tier is a tier that has failed, as where it raises."""
    mini = Mini(load_mode=load_mode, late=3)
    known = prompt(6, seed=2)
    mini.only_in_cpu(known)
    owner = getattr(mini.tier, part)

    def interrupted(*_: Any, **__: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, method, interrupted)
    mini.add(known, count=3)
    asked = mini.ask("resize", gib=5 / 1024) if method == "resize" else None
    with pytest.raises(KeyboardInterrupt):
        mini.run()
    mini.run()
    mini.check()
    assert mini.breaker.detached and "KeyboardInterrupt" in mini.breaker.failure
    assert asked is None or (asked.done.is_set() and asked.error)
    assert mini.changed() == mini.before
    assert free_blocks(mini) == len(mini.pool.blocks) - 1


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("method", ["schedule_over", "disclaim"])
@pytest.mark.parametrize("load_mode", ["inline", "parked"])
def test_a_step_is_sent_whatever_fails_when_its_schedule_ends(
    load_mode: str, method: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was to do is done again before the tier is detached."""
    mini = Mini(load_mode=load_mode, late=3)
    known = prompt(6, seed=2)
    mini.only_in_cpu(known)
    _fail_once(mini, method, after, monkeypatch)
    mini.add(known, count=3)
    mini.begin_step()
    assert mini.breaker.detached
    serves_on(mini)


@pytest.mark.parametrize("method", ["schedule_over", "disclaim"])
def test_a_step_that_would_be_told_wrong_is_not_sent(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails again as the tier is detached: nobody knows what vLLM's objects are like."""
    mini = Mini(load_mode="parked", late=3)
    mini.only_in_cpu(prompt(6, seed=2))
    monkeypatch.setattr(_owner(mini, method), method, fails)
    mini.add(prompt(6, seed=2))
    for _ in range(2):
        with pytest.raises(PromiseBroken, match="it is made to fail"):
            mini.begin_step()


@pytest.mark.parametrize("after", [False, True])
def test_what_vllm_raises_is_what_is_raised_whatever_fails_behind_it(
    after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mini = Mini()
    mini.add(prompt(3, seed=1))
    with monkeypatch.context() as patched:
        patched.setattr(mini.kv_manager, "allocate_slots", _ends)
        _fail_once(mini, "schedule_over", after, monkeypatch)
        with pytest.raises(ZeroDivisionError):
            mini.step()
    serves_on(mini)


@pytest.mark.parametrize("nth", [1, 2])
def test_a_reset_is_vllms_own_where_nobody_knows_what_the_gpu_has(
    nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before vLLM's, and behind one that has not succeeded."""
    mini = Mini()
    mini.only_in_cpu(prompt(3, seed=1))
    mini.add(prompt(2, seed=4))
    mini.step()  # it holds blocks, so that vLLM's reset does not succeed
    _fail_once(mini, "content", False, monkeypatch, nth)
    assert not mini.scheduler.reset_prefix_cache()
    assert mini.breaker.detached
    serves_on(mini)


def _owner(mini: Mini, method: str) -> Any:
    return mini.view if method == "schedule_over" else mini.view.adapter


def _fail_once(
    mini: Mini, method: str, after: bool, monkeypatch: pytest.MonkeyPatch, nth: int = 1
) -> None:
    """The nth call of a method raises, before or after it has done its work."""
    owner, calls = _owner(mini, method), list[int]()
    as_made = getattr(owner, method)

    def call(*args: Any) -> Any:
        calls.append(1)
        result = as_made(*args) if after or len(calls) != nth else None
        return fails() if len(calls) == nth else result

    monkeypatch.setattr(owner, method, call)
