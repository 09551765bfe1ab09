"""A user's own policy is found by entry point, and what is none is refused in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvoffload_patch.config import ConfigError, Settings
from kvoffload_patch.policy_names import GROUP
from kvoffload_patch.tier.policies import policy_named
from kvoffload_patch.tier.policies.arc import ArcPolicy
from kvoffload_patch.tier.policies.own import METHODS, PolicyRefused
from kvoffload_patch.tier.policy import EvictionPolicy

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


def test_the_model_checks_run_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from tier import tier_machine
    from tier.tier_traffic import Traffic

    known: dict[str, Any] = {**tier_machine.POLICIES, "mine": policy_named("mine")}
    for seed, store in enumerate(("eager", "lazy", "auto")):
        machine = type(
            "own",
            (tier_machine.TierMachine,),
            {"eviction": "mine", "store": store, "policies": known},
        )
        Traffic(machine(), seed).run(steps=100)
