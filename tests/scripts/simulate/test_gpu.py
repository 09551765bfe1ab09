"""vLLM's rules for blocks: what is handed out first, and what is found."""

from __future__ import annotations

from scripts.simulate.gpu import GpuPool


def filled(gpu: GpuPool, *keys: int) -> list[int]:
    blocks = gpu.allocate(len(keys))
    for key, block in zip(keys, blocks):
        gpu.cache(key, block)
    return blocks


def test_the_tail_of_what_was_given_back_first_is_handed_out_first() -> None:
    gpu = GpuPool(4)
    a, b = filled(gpu, 1, 2), filled(gpu, 3, 4)
    gpu.release(b[::-1])
    gpu.release(a[::-1])
    assert gpu.allocate(3) == [b[1], b[0], a[1]]
    assert gpu.find([1, 2]) == [a[0]]
    assert gpu.find([3, 4]) == gpu.find([2]) == []


def test_a_block_without_a_key_is_handed_out_before_all_others() -> None:
    gpu = GpuPool(3)
    a = filled(gpu, 1)
    (plain,) = gpu.allocate(1)
    gpu.release(a)
    gpu.release([plain])
    assert gpu.allocate(2) == [plain, 2]


def test_a_block_stays_while_somebody_uses_it() -> None:
    gpu = GpuPool(2)
    a = filled(gpu, 1, 2)
    gpu.hold(a[:1])
    assert gpu.release(a[::-1]) == [a[1]]
    assert gpu.idle(a) == 1
    assert list(gpu.free) == [a[1]]
    gpu.release(a[:1])
    gpu.hold(gpu.find([1, 2]))
    assert not gpu.free


def test_a_second_block_of_a_key_is_not_cached() -> None:
    gpu = GpuPool(2)
    a, b = filled(gpu, 1), filled(gpu, 1)
    assert gpu.find([1]) == a
    assert gpu.key_of[b[0]] is None


def test_a_free_block_can_be_made_the_last() -> None:
    gpu = GpuPool(3)
    gpu.make_last(0)
    assert gpu.allocate(3) == [1, 2, 0]
