"""A user's own policy is found by entry point, and what is none is refused in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tier.test_manager import always, store

from kvoffload_patch.config import ConfigError, Settings
from kvoffload_patch.policy_names import GROUP
from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.policies import policy_named
from kvoffload_patch.tier.policies.arc import ArcPolicy
from kvoffload_patch.tier.policies.lru import LRUPolicy
from kvoffload_patch.tier.policies.own import METHODS, PolicyRefused
from kvoffload_patch.tier.policy import EvictionPolicy, PolicyBroken
from kvoffload_patch.tier.state import NO_KEY

CODE = """
from kvoffload_patch.tier.policies.lru import LRUPolicy

class Mine(LRUPolicy):
    pass

class Half:
    def __init__(self, key_of): pass
    def grow(self): pass

def raises(key_of):
    raise OSError("the disk is full")
"""


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two installed packages with entry points."""
    (tmp_path / "my_policies.py").write_text(CODE)
    named = {
        "one": "mine = my_policies:Mine\nhalf = my_policies:Half\nraises = my_policies:raises\n"
        "gone = my_policies:Gone\nlost = no_such_module:Mine\ntwice = my_policies:Mine\n"
        "arc = my_policies:Mine\n",
        "two": "twice = my_policies:Mine\n",
    }
    for name, rows in named.items():
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[{GROUP}]\n{rows}")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_it_is_named_by_the_variable_and_made_of_its_entry_point() -> None:
    name = Settings.from_env({"KVOFFLOAD_EVICTION": "mine"}).eviction
    policy = policy_named(name)(["a", "b"])
    assert type(policy).__name__ == "Mine"
    policy.insert([0, 1])
    assert list(policy.evict(1)) == [0]


def test_a_name_of_this_package_is_its_own() -> None:
    assert policy_named("arc") is ArcPolicy


@pytest.mark.parametrize("name", ["my_policies:Mine", "os", "mine2", "../mine", "Mine"])
def test_a_name_that_no_package_has_is_a_wrong_value_and_imports_nothing(name: str) -> None:
    with pytest.raises(ConfigError, match=f"is .{name}., expected one of adaptive, arc"):
        Settings.from_env({"KVOFFLOAD_EVICTION": name})
    with pytest.raises(PolicyRefused, match="found 0; install"):
        policy_named(name)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("half", "Half without miss, insert, hit, regroup, pin, unpin, remove, evict;"),
        ("raises", "OSError: the disk is full;"),
        ("gone", "AttributeError: "),
        ("lost", "ModuleNotFoundError: No module named 'no_such_module';"),
        ("twice", "found 2; install one package that has it"),
    ],
)
def test_what_is_no_policy_is_refused_in_one_sentence(name: str, found: str) -> None:
    with pytest.raises(PolicyRefused) as refused:
        policy_named(name)
    text = str(refused.value)
    assert found in text and text.endswith("leave KVOFFLOAD_EVICTION out.") and "\n" not in text


def test_the_methods_asked_for_are_those_of_the_interface() -> None:
    named = [name for name in vars(EvictionPolicy) if not name.startswith("_")]
    assert sorted(METHODS) == sorted(named)


class Forgetful(LRUPolicy):
    """It does not know of loads."""

    def pin(self, slots: Sequence[int]) -> None: ...


class Greedy(LRUPolicy):
    def evict(self, count: int) -> Sequence[int]:
        return super().evict(count + 1)


class Twice(LRUPolicy):
    def evict(self, count: int) -> Sequence[int]:
        return [super().evict(1)[0]] * count


class GivesUpFree(LRUPolicy):
    def evict(self, count: int) -> Sequence[int]:
        return [slot for slot, key in enumerate(self._key_of) if key is NO_KEY][:count]


class NoSlot(LRUPolicy):
    def evict(self, count: int) -> Sequence[int]:
        return [-1]  # as some say that there is none


@pytest.mark.parametrize("ended", [False, True], ids=["at once", "by prefixes"])
@pytest.mark.parametrize(
    ("policy", "found"),
    [
        (Forgetful, "2 of 2, 2 of them pinned"),
        (Greedy, "3 of 2, 0 of them pinned"),
        (Twice, "slot ., which holds none"),
        (GivesUpFree, "slot ., which holds none"),
        (NoSlot, "slot -1, which holds none"),
    ],
)
def test_one_that_gives_up_what_it_may_not_is_named(policy: Any, found: str, ended: bool) -> None:
    tier = OffloadManager(5, policy)
    store(tier, "abcde")
    if ended:  # what it gives up is due, and its tail leaves before it
        tier.request_ended("abcde")
    if policy is Forgetful:
        tier.begin_load("abcde", range(10, 15))
    if policy is GivesUpFree:
        tier.discard("a")
        tier.discard("b")
        tier.queue_store("more", 22)
    for block, key in enumerate(("new", "newer"), 20):
        tier.queue_store(key, block)
    named = f"expected the eviction policy .*[.]{policy.__name__} to give up .*{found}; correct it"
    with pytest.raises(PolicyBroken, match=named):
        tier.make_plan(always)


def test_one_that_forgets_pins_is_noticed_by_a_resize() -> None:
    tier = OffloadManager(5, Forgetful)
    store(tier, "abcde")
    tier.begin_load("ab", [10, 11])
    with pytest.raises(PolicyBroken, match="5 of 5, 2 of them pinned"):
        tier.change_policy(LRUPolicy)


def test_the_model_checks_run_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from tier import tier_machine
    from tier.tier_traffic import Traffic

    known: dict[str, Any] = {**tier_machine.POLICIES, "mine": policy_named("mine")}
    for seed, when in enumerate(("eager", "lazy", "auto")):
        machine = type(
            "own",
            (tier_machine.TierMachine,),
            {"eviction": "mine", "store": when, "policies": known},
        )
        Traffic(machine(), seed).run(steps=100)
