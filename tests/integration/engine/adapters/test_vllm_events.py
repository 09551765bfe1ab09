"""The tier's own KV cache events: what is in them, in every release's shape."""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import msgspec
from integration.engine.mini import BLOCK, Mini
from scheduler_half.scenarios import prompt

from kvoffload_patch.integration.engine.adapters.vllm_events import KVEvents

COMMON = [
    ("block_hashes", list), ("parent_block_hash", Any), ("token_ids", list), ("block_size", int),
    ("lora_id", Any),
]  # fmt: skip
# Fields as they came, release by release.
OLDEST: list[Any] = []
MEDIUM = [("medium", Any)]
EXTRA = [*MEDIUM, ("lora_name", Any), ("extra_keys", Any, None)]
LATEST = [
    *EXTRA, ("group_idx", Any, None), ("locality", Any, None), ("session_id", Any, None),
    ("lookahead_token_ids", Any, None),
]  # fmt: skip
REMOVED = {"medium", "group_idx", "locality"}


class World:
    """A pool with events of one era, and the tier's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fields: list[Any]) -> None:
        about = [field for field in fields if field[0] in REMOVED]
        self.stored = msgspec.defstruct("BlockStored", [*COMMON, *fields])
        self.removed = msgspec.defstruct("BlockRemoved", [COMMON[0], *about])
        module = types.ModuleType("vllm.distributed.kv_events")
        module.BlockStored, module.BlockRemoved = self.stored, self.removed  # type: ignore[attr-defined]
        import vllm.distributed

        monkeypatch.setitem(__import__("sys").modules, module.__name__, module)
        monkeypatch.setattr(vllm.distributed, "kv_events", module, raising=False)
        self.pool = SimpleNamespace(kv_event_queue=[])
        self.pool.hash_block_size = 2
        self.held: set[Hashable] = set()
        self.gpu: set[Hashable] = set()
        on_gpu = self.gpu.__contains__
        self.events = KVEvents(self.pool, self.held.__contains__, on_gpu, [0], str.upper)

    def cache(
        self, names: str, parent: str | None = None, before: str = "", group: int = 0,
        size: int = 2, **more: Any,
    ) -> None:  # fmt: skip
        """vLLM caches blocks of two tokens; a dash is one that a window has left.

        ``before``: the blocks of the request before them. ``size``: tokens of the group's blocks.
        """
        keys = [None if name == "-" else name for name in names]
        hashes = [f"hash {key}" for key in keys if key]
        tokens = [f"{name}{n}" for name in names for n in (1, 2)]
        known = set(self.stored.__struct_fields__)
        given = {"medium": "GPU", "lora_name": None, **more}
        event = self.stored(
            block_hashes=hashes, parent_block_hash=parent, token_ids=tokens, block_size=2,
            lora_id=7, **{name: value for name, value in given.items() if name in known},
        )  # fmt: skip
        self.pool.kv_event_queue.append(event)
        left = [None] * len(before) if group else [*before]  # by the window
        blocks = [SimpleNamespace(block_hash=key) for key in [*left, *keys]]
        request = SimpleNamespace(block_hashes=before + names)
        self.gpu.update(key for key in keys if key)
        self.events.cached(request, blocks, len(before), len(blocks), size, group)
        self.events.take_in()

    def take(self) -> list[Any]:
        """What has been said since the last call."""
        queue, self.pool.kv_event_queue = self.pool.kv_event_queue, []
        return [msgspec.structs.asdict(event) for event in queue]


def test_a_stored_block_has_all_that_vllm_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, LATEST)
    world.cache(
        "abc", parent="hash 0", extra_keys=[("salt",), None, None], group_idx=1, session_id="one",
        lookahead_token_ids=[[1], [2], [3]],
    )  # fmt: skip
    world.take()
    world.events.stored(["b", "c"])
    assert world.take() == [
        {
            "block_hashes": ["hash b", "hash c"], "parent_block_hash": "hash a",
            "token_ids": ["b1", "b2", "c1", "c2"], "block_size": 2, "lora_id": 7, "medium": "CPU",
            "lora_name": None, "extra_keys": [None, None], "group_idx": 1, "locality": "LOCAL",
            "session_id": None, "lookahead_token_ids": [[2], [3]],
        }
    ]  # fmt: skip
    world.events.left(["b", "never stored"])
    assert world.take() == [
        {"block_hashes": ["hash b"], "medium": "CPU", "group_idx": 1, "locality": "LOCAL"}
    ]
    world.events.withdraw()
    assert [event["block_hashes"] for event in world.take()] == [["hash c"]]


def test_a_loaded_block_is_told_of_as_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, EXTRA)
    world.held.update("ab")
    world.cache("ab", parent=None)
    world.cache("cd", parent="hash b")
    world.take()
    world.events.loaded(["a", "b", "c"])
    first, second = world.take()
    assert (first["block_hashes"], first["parent_block_hash"]) == (["hash a", "hash b"], None)
    assert (second["block_hashes"], second["token_ids"]) == (["hash c"], ["c1", "c2"])
    assert second["parent_block_hash"] == "hash b" and second["medium"] == "GPU"


def test_blocks_of_two_events_are_told_of_in_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the first of one and the second of another, which only look like neighbours."""
    world = World(monkeypatch, LATEST)
    world.held.update("abcd")
    world.cache("ab")
    world.cache("cd", parent="hash b", before="ab")
    world.take()
    world.events.stored(["a", "d"])
    first, second = world.take()
    assert (first["block_hashes"], first["token_ids"]) == (["hash a"], ["a1", "a2"])
    assert (second["block_hashes"], second["token_ids"]) == (["hash d"], ["d1", "d2"])


def test_without_a_medium_only_loads_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, OLDEST)
    world.cache("ab")
    world.take()
    world.events.stored(["a", "b"])
    world.events.left(["a"])
    assert world.take() == []
    world.events.loaded(["b"])
    assert [event["block_hashes"] for event in world.take()] == [["hash b"]]


def test_a_block_behind_one_that_a_window_left_is_told_of_without_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, MEDIUM)
    world.cache("a-bc", parent="hash of before")
    world.take()
    world.events.stored(["a", "b", "c"])
    whole, behind = world.take()
    assert (whole["parent_block_hash"], whole["token_ids"]) == ("hash of before", ["a1", "a2"])
    # Its parent has no hash in the stream: as vLLM's connectors tell of such blocks.
    assert behind["block_hashes"] == ["hash b", "hash c"]
    assert (behind["token_ids"], behind["block_size"]) == ([], 0)
    assert behind["parent_block_hash"] is None
    world.events.loaded(["c"])
    (last,) = world.take()
    assert (last["parent_block_hash"], last["token_ids"]) == ("hash b", ["c1", "c2"])


def test_what_nobody_has_any_more_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, MEDIUM)
    world.held.update("AB")
    world.cache("AB")
    for nth in range(400):
        world.cache(chr(1000 + nth))
    assert len(world.events._told) < 10
    world.events.loaded(["A", "B"])
    assert len(world.take()) == 401 + 1


def test_what_was_cached_is_taken_in_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world, asked = World(monkeypatch, MEDIUM), list[Hashable]()

    def needed(key: Hashable) -> bool:
        asked.append(key)
        return True

    world.events = KVEvents(world.pool, needed, world.gpu.__contains__, [0], str.upper)
    world.cache("ab")
    world.cache("cd", before="ab", parent="hash b")
    assert asked
    asked.clear()
    world.events.take_in()
    assert asked == []


def test_a_block_that_was_forgotten_leaves_under_the_name_it_came_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, LATEST)
    world.cache("abc", group_idx=1)
    world.events.stored(["a", "b", "c"])
    world.take()
    for nth in range(10):  # nobody is said to need a, b and c
        world.cache(chr(1000 + nth))
    assert not {"a", "b", "c"} & set(world.events._told)
    world.take()
    world.events.left(["b"])
    world.events.withdraw()
    assert [(event["block_hashes"], event["group_idx"]) for event in world.take()] == [
        (["hash b"], 1),
        (["hash a", "hash c"], 1),
    ]


def test_blocks_that_vllm_has_not_told_of_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, MEDIUM)
    world.cache("abc")
    world.take()
    world.events.stored(["x", "a", "y", "c"])
    world.events.loaded(["b", "x", "c", "y"])
    assert [event["block_hashes"] for event in world.take()] == [
        *(["hash a"], ["hash c"]),
        ["hash b", "hash c"],
    ]
    world.events.left(["x", "y", "a", "b", "c"])
    assert [event["block_hashes"] for event in world.take()] == [["hash a", "hash c"]]


def test_a_block_is_told_of_behind_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that does not know a parent passes over what is behind it."""
    world = World(monkeypatch, LATEST)
    world.held.update("abcde")
    world.cache("abc")
    world.cache("de", parent="hash c", before="abc")
    world.gpu.clear()  # the last of a prefix was stored, and lost, first
    world.take()
    world.events.stored(["e"])
    world.events.stored(["d", "c"])
    assert world.take() == []
    world.events.stored(["b", "a"])
    assert [event["block_hashes"] for event in world.take()] == [
        ["hash a", "hash b", "hash c"],
        ["hash d", "hash e"],
    ]
    world.events.left("abcde")
    assert [len(event["block_hashes"]) for event in world.take()] == [5]


def test_a_block_that_waits_is_told_of_when_the_gpu_has_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, LATEST)
    world.held.update("abcd")
    world.cache("abc")
    for again in (lambda: world.cache("a"), lambda: world.events.loaded(["a"])):
        world.gpu.clear()
        world.events.stored(["b", "c"])
        world.take()
        world.gpu.add("a")
        again()
        on_gpu, told = world.take()
        assert (on_gpu["block_hashes"], on_gpu["medium"]) == (["hash a"], "GPU")
        assert (told["block_hashes"], told["medium"]) == (["hash b", "hash c"], "CPU")
        world.events.left("bc")
        world.take()
    world.events.withdraw()
    assert world.take() == [], "nothing waits, or is told of, any more"


def test_a_block_that_waits_and_leaves_is_never_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, LATEST)
    world.held.update("abc")
    world.cache("abc")
    for leave in (lambda: world.events.left(["b", "c"]), world.events.withdraw):
        world.gpu.clear()
        world.take()
        world.events.stored(["c", "b"])
        leave()
        world.events.stored(["a"])
        world.events.left(["a"])
        assert [event["block_hashes"] for event in world.take()] == [["hash a"]] * 2
        assert not world.events._waits and not world.events._behind


def test_of_two_blocks_that_wait_for_one_parent_each_leaves_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, LATEST)
    world.held.update("abcd")
    world.cache("a")
    for name in "bcd":
        world.cache(name, parent="hash a", before="a")
    world.gpu.clear()
    world.take()
    world.events.stored(["b", "c", "d"])
    world.events.left(["b"])
    world.events.left(["c"])
    world.events.stored(["a"])
    assert [event["block_hashes"] for event in world.take()] == [["hash a"], ["hash d"]]


def test_a_block_of_a_window_waits_for_what_its_prefix_begins_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``A`` is block ``a`` in the group that reads all of a prefix."""
    world = World(monkeypatch, LATEST)
    world.held.update("ABCbc")
    world.cache("ABC")
    world.cache("bc", parent="hash a", before="a", group=1)
    world.gpu.clear()
    world.take()
    world.events.stored(["c", "b"])
    assert world.take() == []
    world.events.stored(["A"])
    assert [event["block_hashes"] for event in world.take()] == [["hash A"], ["hash b"]]


def test_each_block_waits_for_the_one_before_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a group that reads a whole prefix, and in one of windows for that of the former."""
    world = World(monkeypatch, LATEST)
    world.held.update("ABCDabcd")
    for names, group in (("ABCD", 0), ("abcd", 1)):
        world.cache(names[:2], group=group)
        world.cache(names[2:], f"hash {names[1]}", names[:2], group)
    world.gpu.clear()
    world.take()
    told = {key: "" for key in "dcDb"} | {"a": "a", "A": "Ab", "C": "", "B": "BCDcd"}
    for key, expected in told.items():
        world.events.stored([key])
        said = [one for event in world.take() for one in event["block_hashes"]]
        assert sorted(said) == [f"hash {one}" for one in expected], key


@pytest.mark.parametrize(("size", "key"), [(4, str.upper), (2, None)])
def test_a_block_of_a_window_that_is_no_block_of_its_prefix_waits_for_none(
    size: int, key: Callable[[Any], Hashable] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has more tokens than a hash stands for; or no group reads a whole prefix."""
    world = World(monkeypatch, LATEST)
    world.events = KVEvents(world.pool, world.held.__contains__, world.gpu.__contains__, [0], key)
    world.cache("abc", group=1, size=size)
    world.gpu.clear()
    world.take()
    world.events.stored(["c", "b"])
    assert [event["block_hashes"] for event in world.take()] == [["hash c"], ["hash b"]]


def test_an_event_of_other_blocks_is_not_taken_for_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, MEDIUM)
    world.cache("a")
    request = SimpleNamespace(block_hashes="abcd")
    blocks = [SimpleNamespace(block_hash=key) for key in "abcd"]
    world.events.cached(request, blocks, 1, 3, 2, 0)  # of which none told
    world.pool.kv_event_queue.append(world.removed(block_hashes=["hash z"], medium="GPU"))
    world.events.cached(request, blocks, 3, 4, 2, 0)
    world.events.take_in()
    world.take()
    world.events.cached(request, blocks, 3, 4, 2, 0)  # of which nothing was said at all
    world.events.take_in()
    world.events.stored(["a", "b", "c", "d"])
    assert [event["block_hashes"] for event in world.take()] == [["hash a"]]


def test_a_tier_that_is_withdrawn_tells_that_its_blocks_are_gone() -> None:
    """A router would send requests for them to this engine for ever."""
    mini = Mini(events=True)
    mini.only_in_cpu(prompt(4, seed=1))
    assert mini.replay is not None and sum(mini.replay.held["CPU"].values()) == 4
    mini.breaker.withdraw()
    mini.replay.check()  # with the GPU's blocks alone


def test_looking_up_tells_nobody_of_what_it_finds() -> None:
    mini = Mini(events=True)
    asked = prompt(4, seed=1)
    mini.only_in_cpu(asked)
    mini.add(asked)
    request = next(iter(mini.scheduler.waiting))
    request.kv_cache_report_mode = "full"  # from 0.26 on vLLM then tells of what a request reuses
    mini.pool.kv_event_queue.clear()
    mini.view.prefix.longest_hit(request, mini.pool)
    found = mini.tier._admission._pool.look_up(request, 100)
    assert len(found.keys) * BLOCK == found.tokens == 4 * BLOCK
    assert mini.pool.kv_event_queue == []
    assert getattr(mini.kv_manager, "enable_kv_cache_events", True)  # from 0.26 on it has one
