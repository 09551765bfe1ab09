"""An adapter that is loaded again under its name gets nothing of the one before from the tier."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from integration.engine.world import World, prompt
from vllm.lora.request import LoRARequest

from kvoffload_patch.integration.engine import hooks, step_hooks
from kvoffload_patch.integration.engine.adapters import vllm_lora
from kvoffload_patch.integration.engine.adapters.vllm_lora import LoraNames, adapters_of
from kvoffload_patch.integration.protocol import TIER

PROMPT = prompt(3, seed=1)


def lora(path: str = "/a", name: str = "x", in_place: bool = False, number: int = 1) -> LoRARequest:
    made = LoRARequest(name, number, path)
    if in_place:
        if not hasattr(made, "load_inplace"):
            pytest.skip("no adapter is loaded in place before 0.15")
        made.load_inplace = True
    return made


def names_of(path_in_keys: bool = False) -> LoraNames:
    """Of a scheduler without requests, as if the release had keys with or without the path."""
    names = LoraNames(SimpleNamespace(requests={}))
    names._path_in_keys = path_in_keys
    return names


def test_what_keys_have_of_an_adapter_is_found_out() -> None:
    from vllm.v1.core.kv_cache_utils import _gen_lora_extra_hash_keys

    keys = [
        _gen_lora_extra_hash_keys(SimpleNamespace(lora_request=lora(path))) for path in ("/a", "/b")
    ]
    assert LoraNames(None)._path_in_keys is (keys[0] != keys[1])


@pytest.mark.parametrize(
    ("path_in_keys", "then", "stale"),
    [
        (False, {}, False),
        (False, {"path": "/b"}, True),
        (False, {"path": "/b", "name": "y"}, False),
        (False, {"in_place": True}, True),
        (True, {"path": "/b"}, False),
        (True, {"path": "/b", "in_place": True}, False),
        (True, {"in_place": True}, True),
        (False, {"number": 2}, True),
        (True, {"number": 2}, True),
        (True, {"number": 2, "path": "/b"}, False),
    ],
)
@pytest.mark.parametrize("first_in_place", [False, True])
def test_what_is_loaded_again_may_have_the_keys_of_other_weights(
    path_in_keys: bool, then: dict[str, Any], stale: bool, first_in_place: bool
) -> None:
    names = names_of(path_in_keys)
    names.named(lora(in_place=first_in_place))
    assert not names.stale
    names.named(lora(**then))
    assert names.stale == ({"x"} if stale else set())


def write(folder: Path, weights: str) -> str:
    """An adapter's files; other weights of the same length are told by when they were written."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).write_text(weights)
        os.utime(folder / name, ns=(0, sum(map(ord, weights))))
    return str(folder)


@pytest.mark.parametrize("path_in_keys", [False, True])
@pytest.mark.parametrize(("weights", "stale"), [("a", set()), ("b", {"x"})])
def test_what_was_unloaded_is_the_same_if_its_files_are(
    path_in_keys: bool, weights: str, stale: set[str], tmp_path: Path
) -> None:
    """vLLM's API server gives it another number."""
    names = names_of(path_in_keys)
    names.named(lora(write(tmp_path, "a")))
    names.named(lora(write(tmp_path, weights), number=2))
    assert names.stale == stale


def test_one_that_was_loaded_before_its_files_were_written_is_another(tmp_path: Path) -> None:
    names = names_of()
    names.named(lora(write(tmp_path, "a")))
    names.named(lora(write(tmp_path, "b"), number=2))
    names.all_forgotten()
    names.named(lora(str(tmp_path), number=2))
    names.named(lora(str(tmp_path), number=1))
    assert names.stale == {"x"}, "its files are those of the second one, its weights are not"
    names._scheduler.requests = {
        number: SimpleNamespace(lora_request=lora(str(tmp_path), number=number))
        for number in (2, 1)
    }
    names.all_forgotten()
    assert names.stale == {"x"}, "both compute again"


@pytest.mark.parametrize(("weights", "loaded"), [("a", 3), ("b", 0)])
def test_one_that_was_removed_is_loaded_again_by_the_same_number(
    weights: str, loaded: int, tmp_path: Path
) -> None:
    """As by `LLMEngine.remove_lora` and `add_lora`, after its files were written."""
    engine, path = Engine(), write(tmp_path, "a")
    engine.load(lora(path))
    engine.world.only_in_cpu(PROMPT, lora_request=lora(path))
    write(tmp_path, weights)
    engine.load(lora(path))
    assert engine.loaded(lora(path)) == loaded


@pytest.mark.parametrize("path_in_keys", [False, True])
def test_which_weights_it_has_is_not_known_where_it_may_have_been_there(
    path_in_keys: bool, tmp_path: Path
) -> None:
    names, path = names_of(path_in_keys), write(tmp_path, "a")
    names.named(lora(path), to_be_loaded=True)
    write(tmp_path, "b")
    names.all_forgotten()
    names.named(lora(path), to_be_loaded=True)
    assert not names.stale, "whichever, nothing else was computed since"
    names.named(lora(path, number=2), to_be_loaded=True)
    assert names.stale == {"x"}, "the first may still have those from before"


def test_files_are_looked_at_when_it_is_loaded_and_not_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    monkeypatch.setattr(vllm_lora, "_stamps", looked.append)
    names, path = names_of(), str(tmp_path)
    for _ in range(2):
        names.named(lora(path))
        names.named(lora(path))
        names.all_forgotten()
    assert looked == [path]
    names.named(lora(path, number=2))
    names.named(lora(path, number=1))
    assert looked == [path, path], "it is loaded with what was there before"


def test_files_are_looked_at_again_when_it_is_loaded_in_place(tmp_path: Path) -> None:
    names = names_of()
    names.named(lora(write(tmp_path, "a")))
    names.named(lora(write(tmp_path, "b"), in_place=True))
    assert names.stale == {"x"}
    names.all_forgotten()
    names.named(lora(str(tmp_path)))
    names.named(lora(str(tmp_path), number=2))
    assert not names.stale, "both have the weights that were written last"


def test_not_all_adapters_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_lora, "EXACT_ADAPTERS", 2)
    names = names_of()
    for number in range(1, 6):
        names.named(lora(number=number))
    assert [loaded.number for loaded in names._files] == [4, 5]


@pytest.mark.parametrize("path_in_keys", [False, True])
def test_the_name_that_was_not_used_for_longest_is_forgotten_and_not_trusted(
    path_in_keys: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a trainer that loads one under a new name every few seconds, for weeks."""
    monkeypatch.setattr(vllm_lora, "EXACT_ADAPTERS", 3)
    names = names_of(path_in_keys)
    for number in range(1, 10):
        names.named(lora(name=f"step {number}", number=number))
        names.named(lora(name="base", number=99))
    assert len(names._loaded) == 3 and not names.stale
    used = {f"step {number}": not names.is_stale(f"step {number}") for number in range(1, 11)}
    assert [name for name, fine in used.items() if fine] == ["step 8", "step 9", "step 10"]
    assert not names.is_stale("base")
    names.named(lora(name="step 2", number=100))
    names.named(lora(name="step 11", number=101))
    assert names.stale == {"step 2"}
    names.all_forgotten()
    assert not any(map(names.is_stale, used))


def test_names_that_the_tier_is_not_used_for_are_not_kept_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_lora, "EXACT_ADAPTERS", 3)
    names = names_of()
    for number in range(1, 10):
        names.named(lora(name=f"step {number}", number=number))
        names.named(lora("/b", f"step {number}", number=number))
    assert len(names.stale) == 3
    assert all(names.is_stale(f"step {number}") for number in range(1, 10))


def test_all_forgotten_names_are_found_and_few_others() -> None:
    forgotten = vllm_lora._ForgottenNames()
    assert "one" not in forgotten
    for number in range(20_000):
        forgotten.add(f"adapter {number}")
    assert all(f"adapter {number}" in forgotten for number in range(20_000))
    assert sum(f"another {number}" in forgotten for number in range(20_000)) < 20


def test_what_a_request_hits_of_a_forgotten_adapter_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_lora, "EXACT_ADAPTERS", 2)
    engine = Engine()
    engine.load(lora())
    engine.world.only_in_cpu(PROMPT, lora_request=lora())
    for name in "yz":
        engine.load(lora(name=name, number=ord(name)))
    assert [engine.loaded(lora("/b", number=7)) for _ in range(2)] == [0, 0]


def test_after_a_reset_only_what_is_computed_again_has_keys() -> None:
    names = names_of()
    for path in "abc":
        names.named(lora(path))
    names.all_forgotten()
    names.named(lora("d", in_place=True))
    assert not names.stale, "nothing was computed since"
    names.named(lora("e"))
    assert names.stale == {"x"}
    for name in "yz":
        names.named(lora("c", name))
    names._scheduler.requests = {
        "one": SimpleNamespace(lora_request=lora("c", "y")),
        "another": SimpleNamespace(lora_request=None),
    }
    names.all_forgotten()
    for name in "yz":
        names.named(lora("d", name))
    assert names.stale == {"y"}, "it computes what it had again, with the adapter before"


class Engine:
    """An engine core that loads adapters, and whose scheduler takes requests."""

    def __init__(self, load_mode: str = "inline") -> None:
        self.world = World(store="eager", load_mode=load_mode)
        setattr(self.world.scheduler, TIER, self.world.breaker)
        self.core = SimpleNamespace(scheduler=self.world.scheduler)
        self.breaker = self.world.breaker
        self.world.view.loras._path_in_keys = False

    def load(self, adapter: LoRARequest) -> None:
        assert hooks.add_lora(lambda lora_request: True, self.core, (adapter,), {})

    def add(self, adapter: LoRARequest | None) -> Any:
        taken: list[Any] = []
        request = self.world.add(PROMPT, lora_request=adapter)
        step_hooks.add_request(taken.append, self.world.hooks.live, self.breaker)(request)
        assert taken == [request]
        return request

    def loaded(self, adapter: LoRARequest | None) -> int:
        """Blocks loaded for a request that names this adapter, or none."""
        request = self.add(adapter)
        plan = self.world.step(request)
        self.world.all_done()
        self.world.end(request)
        self.world.flush_gpu()
        self.world.step()
        return len(plan.before[0].source_ids) if plan is not None and plan.before else 0

    def reset(self) -> None:
        pool = self.world.pool
        step_hooks.reset_prefix_cache(pool.reset_prefix_cache, [True], self.breaker)()


def test_the_tier_is_not_used_for_an_adapter_that_was_loaded_again() -> None:
    engine = Engine()
    engine.load(lora())
    for adapter in (lora(), lora(name="y"), None):
        engine.world.only_in_cpu(PROMPT, lora_request=adapter)
    assert engine.loaded(lora()) == 3
    engine.load(lora(in_place=True))
    assert [engine.loaded(it) for it in (lora(), lora(name="y"), None)] == [0, 3, 3]
    assert engine.loaded(lora()) == 0, "its blocks have the keys of the one before"
    engine.reset()
    assert [engine.loaded(lora()) for _ in range(2)] == [0, 3]


def test_a_request_that_names_another_path_is_enough() -> None:
    engine = Engine()
    engine.world.only_in_cpu(PROMPT, lora_request=lora())
    assert [engine.loaded(lora(path)) for path in ("/a", "/b", "/a")] == [3, 0, 0]


def test_what_a_waiting_request_was_found_to_hit_is_not_loaded() -> None:
    engine = Engine()
    engine.world.only_in_cpu(PROMPT, lora_request=lora())
    blocks = engine.world.pool.get_new_blocks(engine.world.pool.get_num_free_blocks())
    waits = engine.add(lora())
    assert engine.world.step() is None, "there is no room for it"
    engine.load(lora())
    engine.load(lora(in_place=True))
    engine.world.pool.free_blocks(blocks)
    plan = engine.world.step(waits)
    assert plan is None or not plan.before


@pytest.mark.parametrize("again", [False, True])
def test_a_load_under_way_is_not_published(again: bool) -> None:
    engine = Engine(load_mode="parked")
    engine.load(lora())
    engine.world.only_in_cpu(PROMPT, lora_request=lora())
    waits = engine.add(lora())
    assert len(engine.world.step().before[0].source_ids) == 3
    if again:
        engine.load(lora(in_place=True))
    engine.world.all_done()
    hits: list[int] = []
    engine.world.step(waits, body=lambda: hits.append(engine.world.gpu_hit(waits)))
    assert hits == [0 if again else 12]
    assert waits.status.name == "RUNNING" and not engine.world.tier._loads.num_parked


def test_updates_that_a_user_vouches_for_change_nothing() -> None:
    engine = Engine()
    engine.world.tier.settings = replace(engine.world.tier.settings, empty_on_update=False)
    engine.world.only_in_cpu(PROMPT, lora_request=lora())
    engine.load(lora())
    engine.load(lora(in_place=True))
    assert engine.loaded(lora()) == 3


def test_an_adapter_that_some_ranks_may_have_counts() -> None:
    engine = Engine()
    engine.load(lora())

    def fails(lora_request: Any) -> None:
        raise RuntimeError("a rank has no room")

    with pytest.raises(RuntimeError, match="no room"):
        hooks.add_lora(fails, engine.core, (lora("/b"),), {})
    assert engine.world.view.loras.stale == {"x"}


def test_without_a_tier_vllm_is_called_and_nothing_else() -> None:
    core = SimpleNamespace(scheduler=SimpleNamespace())
    assert hooks.add_lora(lambda lora_request: "loaded", core, (), {"lora_request": lora()})
    taken: list[Any] = []
    step_hooks.add_request(taken.append, [], SimpleNamespace())("a request")  # type: ignore[arg-type]
    assert taken == ["a request"]


def test_a_step_has_so_many_adapters_and_refuses_others() -> None:
    one, other, none = (
        SimpleNamespace(lora_request=number and lora(number=number)) for number in (1, 2, None)
    )
    config = SimpleNamespace(lora_config=SimpleNamespace(max_loras=2))
    step = adapters_of(SimpleNamespace(vllm_config=config, running=[one, none]))
    assert step is not None
    third = SimpleNamespace(lora_request=lora(number=3))
    assert not step.refuse(other) and not step.refuse(third), "there is room for one more"
    step.admit(other)
    assert step.refuse(third)
    assert not any(map(step.refuse, (one, other, none)))
