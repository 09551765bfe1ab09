"""What is known of kvcached without it: its class, its files, its tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvoffload_patch.integration import kvcached
from kvoffload_patch.integration.patch_table.points import POINTS, VLLM
from kvoffload_patch.patching import Decision
from kvoffload_patch.patching.digest import of_file


class BlockPool:
    """As vLLM's."""

    def touch(self, blocks: list) -> None:
        """Overridden."""

    def get_num_free_blocks(self) -> int:
        return 0


class ElasticBlockPool(BlockPool):
    """As kvcached's."""

    def touch(self, blocks: list) -> None:
        """Its own."""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Files of a package as kvcached's are named; their digests are those expected."""
    files = {name: tmp_path / name for name in kvcached.DIGESTS}
    for file in files.values():
        file.write_text(f"# {file.name}\n")
    digests = {name: of_file(file.read_bytes()) for name, file in files.items()}
    monkeypatch.setattr(kvcached, "DIGESTS", digests)
    monkeypatch.setattr(kvcached, "find_source", files.__getitem__)
    monkeypatch.setattr(metadata, "version", lambda name: {"kvcached": kvcached.VERSION}[name])
    return tmp_path


def pool_of(module: str) -> object:
    """A pool whose class comes from a module."""
    return type(kvcached.POOL, (), {"__module__": module})()


def test_what_was_read_of_it_is_known(installed: Path) -> None:
    assert list(kvcached.unknown(pool_of("kvcached.integration.vllm.patches"))) == []
    assert "found one of elsewhere" in next(kvcached.unknown(pool_of("elsewhere.pools")))


def test_another_release_of_it_is_not(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    pool = pool_of("kvcached")
    (installed / "kvcached.kv_cache_manager").write_text("# changed\n")
    assert "kvcached.kv_cache_manager" in next(kvcached.unknown(pool))
    (installed / "kvcached.kv_cache_manager").unlink()
    assert "kvcached.kv_cache_manager" in next(kvcached.unknown(pool))
    monkeypatch.setattr(metadata, "version", lambda name: "0.1.5")
    assert next(kvcached.unknown(pool)) == f"expected kvcached {kvcached.VERSION}, found 0.1.5"
    monkeypatch.setattr(metadata, "version", none)
    assert next(kvcached.unknown(pool)).endswith("found none")


def test_what_its_pool_overrides_is_looked_for_there() -> None:
    decision = Decision(VLLM, "0.26.0", tuple(p for p in POINTS if p.name.startswith("pool.")))
    assert kvcached.with_pool(decision, BlockPool()) is decision
    assert kvcached.owners_of(plain := BlockPool()) == {"BlockPool": plain}
    elastic = ElasticBlockPool()
    moved = kvcached.with_pool(decision, elastic)
    changed = [b for a, b in zip(decision.points, moved.points) if a != b]
    names = {"pool.touch", "pool.get_num_free_blocks"}
    assert {point.name for point in changed} == names
    where = {(point.module, point.attribute) for point in changed}
    own = (__name__, "ElasticBlockPool.touch")
    assert where == {own, (__name__, "BlockPool.get_num_free_blocks")}
    owners = kvcached.owners_of(elastic)
    assert owners == {"ElasticBlockPool": elastic, "BlockPool": elastic}


def test_its_tensors_are_known_by_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not kvcached.has_tensors()
    interfaces = SimpleNamespace(_kvcached_initialized=False)
    monkeypatch.setitem(sys.modules, "kvcached.integration.vllm.interfaces", interfaces)
    assert not kvcached.has_tensors()
    interfaces._kvcached_initialized = True
    monkeypatch.setitem(sys.modules, "kvcached.utils", SimpleNamespace(PAGE_SIZE=2 << 20))
    assert kvcached.has_tensors() and kvcached.page_bytes() == 2 << 20
