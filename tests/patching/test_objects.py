"""Hooks on single objects: checked on the object itself, set together, put back exactly."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest

from kvoffload_patch.patching import (
    Decision,
    Host,
    ObjectHooks,
    PatchPoint,
    PatchTableError,
    SignatureMismatch,
    is_set_on,
)

HOST = Host("FakeHost", ("fakehost",), "fakehost", ">=1", "use 1.x")


class Base:
    def inherited(self, x: int) -> int:
        return x


class Engine(Base):
    def step(self, request: int, count: int = 1) -> tuple[int, int]:
        return request, count

    def stop(self) -> str:
        return "stopped"

    def twice(self, request: int) -> tuple[Any, Any]:
        return self.step(request), self.step(request)


class Derived(Engine):
    """Overrides nothing that has a hook, and calls it as derived classes do."""

    def twice(self, request: int) -> tuple[Any, Any]:
        return super().twice(request)


def mark(wrapped: Callable[..., Any], live: list[bool], calls: list[Any]) -> Callable[..., Any]:
    def hook(*args: Any, **kwargs: Any) -> Any:
        if live:
            calls.append((wrapped.__name__, args, kwargs))
        return wrapped(*args, **kwargs)

    return hook


def fail(wrapped: Callable[..., Any], live: list[bool], calls: list[Any]) -> Callable[..., Any]:
    raise LookupError("from the hook")


def point(attribute: str, parameters: str, hook: str = "mark", on: Any = "object") -> PatchPoint:
    hook = hook and f"{__name__}:{hook}"
    name = attribute.lower()
    names = tuple(parameters.split())
    return PatchPoint(name, __name__, attribute, hook, ">=1", names, None, "Test.", on=on)


STEP = point("Engine.step", "self request")
STOP = point("Engine.stop", "self")


def hooks(owner: Any, *points: PatchPoint) -> ObjectHooks:
    return ObjectHooks(Decision(HOST, "1.0", points or (STEP, STOP)), {"Engine": owner})


def test_a_hook_is_on_its_object_alone_and_its_class_stays_as_made() -> None:
    one, other, made = Engine(), Engine(), dict(vars(Engine))
    calls: list[Any] = []
    both = hooks(one)
    assert vars(one) == {}, "a check has set something"
    both.install(calls)
    assert one.step(1, count=2) == (1, 2) and other.step(3) == (3, 1)
    assert calls == [("step", (1,), {"count": 2})]
    assert dict(vars(Engine)) == made and vars(other) == {}
    both.remove()
    both.remove()
    assert vars(one) == {} and one.step(4) == (4, 1) and len(calls) == 1


@pytest.mark.parametrize("kind", [Engine, Derived])
def test_calls_from_within_and_through_super_meet_the_hook(kind: type[Engine]) -> None:
    calls: list[Any] = []
    one = kind()
    hooks(one, STEP).install(calls)
    one.twice(5)
    assert len(calls) == 2


def test_what_others_set_meanwhile_stays_and_calls_on() -> None:
    one, calls = Engine(), list[Any]()
    first = hooks(one)
    first.install(calls)
    ours, others = one.step, list[Any]()

    def wrapped_by_others(*args: Any) -> Any:
        others.append(args)
        return ours(*args)

    one.step = wrapped_by_others  # type: ignore[method-assign]
    assert one.step(1) == (1, 1) and len(calls) == len(others) == 1
    first.remove()
    assert vars(one) == {"step": wrapped_by_others}, "theirs stays, and ours below it"
    assert one.step(2) == (2, 1) and len(calls) == 1 and len(others) == 2


def test_a_hook_that_cannot_be_made_leaves_none() -> None:
    one = Engine()
    broken = hooks(one, STOP, point("Engine.step", "self request", "fail"))
    with pytest.raises(LookupError, match="from the hook"):
        broken.install([])
    assert vars(one) == {} and not broken.live


def _set_on_object() -> Engine:
    one = Engine()
    one.step = lambda request: (request, 0)  # type: ignore[method-assign,assignment,misc]
    return one


class Overriding(Engine):
    def step(self, request: int, count: int = 1) -> tuple[int, int]:
        return super().step(request, count)


class Unlike:
    def step(self, request: int) -> int:
        return request


@pytest.mark.parametrize(
    ("owner", "found"),
    [
        (_set_on_object(), "engine.step is set on the Engine itself by others"),
        (Overriding(), rf"engine.step is overridden in {__name__}.Overriding"),
        (Unlike(), rf"engine.step expects a Engine, found {__name__}.Unlike"),
    ],
)
def test_another_function_than_the_one_verified_is_refused(owner: Any, found: str) -> None:
    before = dict(vars(owner))
    with pytest.raises(SignatureMismatch, match=found):
        hooks(owner)
    assert vars(owner) == before


def test_a_function_replaced_in_the_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "step", lambda self, batch: batch)
    with pytest.raises(SignatureMismatch, match=r"engine.step takes \(self, batch\)"):
        hooks(Engine())


def test_a_function_that_others_have_taken_out_of_the_class_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(Engine, "stop")
    one = Engine()
    with pytest.raises(SignatureMismatch, match=rf"engine.stop not found in {__name__}.Engine"):
        hooks(one)
    assert vars(one) == {}


def test_what_is_only_checked_is_checked_on_the_object_too() -> None:
    checked = point("Engine.stop", "self", hook="")
    one = Engine()
    both = hooks(one, STEP, checked)
    both.install([])
    assert set(vars(one)) == {"step"}
    one.stop = lambda: "changed"  # type: ignore[method-assign]
    both.remove()
    with pytest.raises(SignatureMismatch, match="engine.stop is set on the Engine itself"):
        hooks(one, STEP, checked)


def test_an_inherited_function_and_points_on_classes() -> None:
    one, calls = Engine(), list[Any]()
    hooks(
        one, point("Engine.inherited", "self x"), point("Engine.stop", "self", on="class")
    ).install(calls)
    assert one.inherited(3) == 3 and set(vars(one)) == {"inherited"}


def test_a_point_without_an_object_is_a_fault_of_the_table() -> None:
    with pytest.raises(PatchTableError, match="there is no object for Engine"):
        ObjectHooks(Decision(HOST, "1.0", (STEP,)), {})


def test_two_at_once_are_refused() -> None:
    one = Engine()
    hooks(one).install([])
    with pytest.raises(SignatureMismatch, match="set on the Engine itself"):
        hooks(one)


def test_a_copy_of_the_object_is_not_hooked_by_surprise() -> None:
    one, calls = Engine(), list[Any]()
    both = hooks(one)
    both.install(calls)
    copied = copy.copy(one)
    both.remove()
    assert copied.step(1) == (1, 1) and calls == [], "its hooks only call on"


class Kept:
    def __init__(self) -> None:
        self.value = 1

    def method(self) -> int:
        return self.value


def test_whether_an_attribute_is_the_objects_own_is_known_without_its_dict() -> None:
    plain, changed = Kept(), Kept()
    had = [type(one) for one in gc.get_referents(plain)]
    assert not is_set_on(plain, "method") and is_set_on(plain, "value")
    assert not is_set_on(plain, "nothing")
    assert [type(one) for one in gc.get_referents(plain)] == had, "attributes are found as before"
    changed.method = lambda: 2  # type: ignore[method-assign]
    assert is_set_on(changed, "method")
    del changed.method
    assert not is_set_on(changed, "method")
