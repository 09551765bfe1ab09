"""One rank's steps on real copies of the CPU device: what it promises, and when it raises."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine.late_copies import LateQueue
from integration.worker.runners import keep_slots, small_runner
from tier.plans import a_load, a_plan, a_store
from transfer.resident import (
    files_opened_since,
    kvoffload_threads,
    open_files,
    unforked_bytes,
)

from kvoffload_patch.integration import kvcached
from kvoffload_patch.integration.protocol import RESULT, TIER
from kvoffload_patch.integration.slot_counts import make_slot_counts
from kvoffload_patch.integration.worker import rpc
from kvoffload_patch.integration.worker import tier as rank
from kvoffload_patch.integration.worker.hooks import execute_model
from kvoffload_patch.integration.worker.vllm_runner import block_layout
from kvoffload_patch.links import LOAD, MISMATCH, RAISED, STORE
from kvoffload_patch.plan import TransferPlan
from kvoffload_patch.transfer import engine as copy_engine
from kvoffload_patch.transfer.backends.torch import TorchBackend
from kvoffload_patch.transfer.errors import TransferError

STEP = SimpleNamespace(total_num_scheduled_tokens=5, num_scheduled_tokens={"a": 5})


@pytest.fixture
def runner() -> Any:
    """Seven blocks of KV in one layer."""
    return small_runner()


@pytest.fixture
def tier(runner: Any) -> Iterator[rank.RankTier]:
    """A rank whose slots 0 and 1 hold blocks 1 and 2."""
    made = rank.RankTier(runner, num_slots=5)
    result = step(made, a_plan(store=a_store(1, (1, 2), (0, 1))))
    assert (result.done_on(STORE), result.failed) == (1, ())
    yield made
    made.close()


def step(tier: rank.RankTier, plan: TransferPlan | None) -> Any:
    """A whole step; returns what it says is done."""
    tier.begin_step(plan, STEP)
    return getattr(tier.end_step(SimpleNamespace(sampled_token_ids=[[1]], req_ids=["a"])), RESULT)


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise OSError("out of memory")


def test_a_step_that_reads_a_load_which_fails_does_not_begin(
    tier: rank.RankTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchBackend, "load", out_of_memory)
    load = a_load(1, (4, 5), (0, 1))
    plan = a_plan((load,), stores_done=1, wait_load=1, promised_loads=(1,))
    with pytest.raises(RuntimeError) as raised:
        tier.begin_step(plan, STEP)
    assert str(raised.value) == (
        "kvoffload_patch: expected copy 1 from cpu to gpu to arrive for the step that reads "
        "it, found that it failed (out of memory); restart the server, and set "
        "KVOFFLOAD_LOAD_MODE=parked if it happens again, so that such a load is recomputed."
    )


def test_its_remedy_names_the_option_where_one_was_given(
    tier: rank.RankTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVOFFLOAD_OPTIONS", "KVOFFLOAD_LOAD_MODE")
    monkeypatch.setattr(TorchBackend, "load", out_of_memory)
    plan = a_plan((a_load(1, (4,), (0,)),), stores_done=1, wait_load=1, promised_loads=(1,))
    with pytest.raises(RuntimeError, match="set --load-mode=parked if it happens again"):
        tier.begin_step(plan, STEP)


def test_a_load_beside_the_step_may_fail_and_is_told(
    tier: rank.RankTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the step waits for it because another one behind it is read."""
    with monkeypatch.context() as broken:
        broken.setattr(TorchBackend, "load", out_of_memory)
        result = step(tier, a_plan((a_load(1, (4,), (0,)),), stores_done=1))
        assert (result.done_on(LOAD), result.failed_on(LOAD)) == (1, (1,))
    plan = a_plan((a_load(2, (5,), (1,)),), wait_load=2, promised_loads=(2,))
    assert step(tier, plan).failed == ((LOAD, 1, RAISED),)
    assert step(tier, a_plan(loads_done=2)).failed == ()


@pytest.mark.parametrize("step_follows", [True, False])
def test_a_load_that_failed_on_this_rank_alone_raises_once_it_is_read(
    tier: rank.RankTier, step_follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that reports has it, so the scheduler publishes it and says that it is done."""
    with monkeypatch.context() as broken:
        broken.setattr(TorchBackend, "load", out_of_memory)
        step(tier, a_plan((a_load(1, (4,), (0,)),), stores_done=1))
    assert step(tier, None).failed_on(LOAD) == (1,)
    plan = a_plan(wait_load=1, promised_loads=(1,), loads_done=1)
    with pytest.raises(RuntimeError, match="expected copy 1 "):
        tier.begin_step(plan, STEP) if step_follows else tier.finish(plan)


def test_kv_tensors_that_were_replaced_are_not_read(tier: rank.RankTier, runner: Any) -> None:
    """A plan would move bytes of memory that the runner does not use any more."""
    runner.kv_caches[0] = runner.kv_caches[0].clone()
    step(tier, None)  # nothing is moved
    with pytest.raises(RuntimeError, match="KV tensors of this rank were replaced"):
        tier.begin_step(a_plan(wait_store=1), STEP)


def test_kv_tensors_that_are_gone_are_not_read(tier: rank.RankTier, runner: Any) -> None:
    runner.kv_caches.clear()
    with pytest.raises(RuntimeError, match="KV tensors of this rank were replaced"):
        tier.begin_step(a_plan(wait_store=1), STEP)


def test_the_first_failure_of_each_direction_is_a_warning_with_its_reason(
    tier: rank.RankTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(rank.logger, "warning", lambda text, *a: said.append(text % a))
    monkeypatch.setattr(TorchBackend, "load", out_of_memory)
    monkeypatch.setattr(TorchBackend, "store", out_of_memory)
    step(tier, a_plan((a_load(1, (4,), (0,)),), stores_done=1))
    step(tier, a_plan((a_load(2, (4,), (0,)),), stores_done=1))
    assert len(said) == 1 and "copy 1 from cpu to gpu has failed (out of memory)" in said[0]
    step(tier, a_plan(store=a_store(2, (3,), (2,))))
    step(tier, a_plan(store=a_store(3, (3,), (2,))))
    assert len(said) == 2 and "copy 2 from gpu to cpu has failed (out of memory)" in said[1]


@pytest.mark.parametrize("whose", ["vLLM's", "the tier's"])
def test_after_a_step_that_raised_no_thread_counts_as_waiting(
    whose: str, tier: rank.RankTier, runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late copy would end the process of an engine that is idle."""
    setattr(runner, TIER, tier)
    forward = out_of_memory if whose == "vLLM's" else lambda _: SimpleNamespace()
    if whose != "vLLM's":
        monkeypatch.setattr(tier._engine, "_top_up_stores", out_of_memory)
    described = SimpleNamespace(**vars(STEP), kvoffload_plan=None)
    with pytest.raises(Exception, match="out of memory"):
        execute_model(forward, runner, (described,), {})
    assert not tier._engine._busy


class Behind(LateQueue):
    """Copies that are done some polls later, as on a device, where it is a stream that waits."""

    def hold(self, stream: object, ticket: int) -> None:
        """The host goes on."""


@pytest.mark.parametrize("connector", [None, object()])
def test_beside_a_connector_the_host_waits_for_stores_of_blocks_that_are_handed_out(
    connector: Any, runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read over the network fills them without waiting for the stream that the store is on."""
    monkeypatch.setattr(copy_engine, "SyncCopyQueue", Behind)
    runner.vllm_config.kv_transfer_config = connector
    tier = rank.RankTier(runner, num_slots=5)
    blocks = runner.kv_caches[0]
    wanted = blocks[1].clone()
    step(tier, a_plan(store=a_store(1, (1,), (0,))))
    tier.begin_step(a_plan(wait_store=1), STEP)
    blocks[1] = -1.0  # the connector, from the host, before the forward pass
    tier.drain()
    step(tier, a_plan((a_load(1, (4,), (0,)),), stores_done=1, wait_load=1))
    tier.drain()
    assert torch.equal(blocks[4], wanted) == (connector is not None)
    tier.close()


def test_beside_a_connector_the_host_waits_for_loads_given_back_and_not_for_those_of_the_step(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that reports had done load 1, whose block is another request's now."""
    monkeypatch.setattr(copy_engine, "SyncCopyQueue", Behind)
    runner.vllm_config.kv_transfer_config = object()
    tier = rank.RankTier(runner, num_slots=5)
    monkeypatch.setattr(Behind, "patience", 50)
    tier.begin_step(a_plan((a_load(1, (4,), (0,)),)), STEP)
    for _ in range(9):
        tier._engine.poll()
    load = a_load(2, (5,), (1,))
    tier.begin_step(a_plan((load,), wait_load=2, loads_done=1, promised_loads=(2,)), STEP)
    assert tier._engine.poll().done_on(LOAD) == 1
    tier.close()


@pytest.mark.parametrize("integrity", ["off", "full"])
def test_a_rank_that_is_closed_leaves_nothing(runner: Any, integrity: str) -> None:
    """Neither does one whose opening fails when all is there."""
    worker = SimpleNamespace(model_runner=runner, rank=0, vllm_config=runner.vllm_config)
    slots = (256 << 20) // 512
    assert rpc.open_rank(worker, slots, integrity=integrity).error == ""
    assert unforked_bytes() >= 256 << 20, "is this looking for mappings?"
    rpc.close_rank(worker)
    gc.collect()
    files, unforked = open_files(), unforked_bytes()
    for fails in (False, True, False):
        board = make_slot_counts([0, 1])
        assert board is not None
        with pytest.MonkeyPatch.context() as patch:
            if fails:
                patch.setattr("kvoffload_patch.transfer.canary._equal", lambda one, other: False)
            opened = rpc.open_rank(worker, slots, "auto", integrity, board.address)
        board.close()
        assert ("other bytes" in opened.error) == fails
        if not fails:
            step(runner.__dict__[TIER], a_plan(store=a_store(1, (1,), (0,))))
        rpc.close_rank(worker)
        gc.collect()
        assert board.address.name.split()[0] not in Path("/proc/self/maps").read_text()
        assert kvoffload_threads() == [] and unforked_bytes() <= unforked
    assert not files_opened_since(files)


@pytest.mark.parametrize("where", ["_begin_step", "end", "_end_step"])
def test_no_step_begins_after_one_that_has_failed(
    tier: rank.RankTier, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who catches that and goes on, as an engine in the user's process can, reads wrong KV."""
    gate = SimpleNamespace(begin=lambda *_: None, end=int, close=int, learnt=False, passes=bool)
    failing: Any = tier
    if where == "end":
        tier._gate = failing = gate  # type: ignore[assignment]
    with monkeypatch.context() as patch:
        patch.setattr(failing, where, out_of_memory)
        with pytest.raises(OSError, match="out of memory"):
            tier.begin_step(None, STEP)
            tier.end_forward()
            tier.end_step(SimpleNamespace(sampled_token_ids=[[1]], req_ids=["a"]))
    for again in (lambda: rank.RankTier.begin_step(tier, None, STEP), lambda: tier.finish(None)):
        with pytest.raises(RuntimeError, match=r"after one that has failed .* \(out of memory\)"):
            again()
    tier._lost = None


@pytest.mark.parametrize(
    ("engines", "tokens", "planned"), [(2, 0, True), (1, 0, True), (2, 1, True), (2, 0, False)]
)
def test_a_batch_behind_a_step_without_tokens_computes_into_no_block(
    tier: rank.RankTier, runner: Any, engines: int, tokens: int, planned: bool
) -> None:
    """Runner V1 gives it the slots of the step before, up to 0.19; loads may fill their blocks."""
    slots = torch.arange(4)
    keep_slots(runner, slots, engines)
    described = SimpleNamespace(total_num_scheduled_tokens=tokens, num_scheduled_tokens={})
    tier.begin_step(a_plan((a_load(1, (4,), (0,)),), stores_done=1) if planned else None, described)
    cleared = engines > 1 and not tokens and planned
    assert slots.tolist() == ([-1] * 4 if cleared else [0, 1, 2, 3])


@pytest.mark.parametrize("keeps", [True, False])
def test_nor_is_it_asked_of_a_runner_that_keeps_no_slots_or_keeps_them_elsewhere(
    tier: rank.RankTier, runner: Any, keeps: bool
) -> None:
    """Runner V2 keeps none; the tables of vllm-ascend are not vLLM's."""
    if keeps:
        keep_slots(runner, slots := torch.arange(4))
        own = SimpleNamespace(slot_mapping=SimpleNamespace(np=None))
        runner.input_batch.block_table.block_tables.insert(0, own)
    else:
        runner.vllm_config.parallel_config.data_parallel_size = 2
    idle = SimpleNamespace(total_num_scheduled_tokens=0, num_scheduled_tokens={})
    tier.begin_step(a_plan((a_load(1, (4,), (0,)),), stores_done=1), idle)
    assert not keeps or slots.tolist() == [-1] * 4


def flip(tier: rank.RankTier, slot: int) -> None:
    tier._host.slots[slot, 3] ^= 1


def behind(runner: Any, integrity: str) -> rank.RankTier:
    """The same as `tier`, with copies that take their time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_engine, "SyncCopyQueue", Behind)
        patch.setattr(copy_engine, "POLL_S", 0.0)
        made = rank.RankTier(runner, num_slots=5, integrity=integrity)
    made.begin_step(a_plan(store=a_store(1, (1, 2), (0, 1))), STEP)
    made.drain()
    return made


@pytest.fixture
def checked(runner: Any) -> Iterator[rank.RankTier]:
    """That with checksums of all blocks."""
    made = behind(runner, "full")
    yield made
    made.close()


@pytest.fixture
def late(runner: Any) -> Iterator[rank.RankTier]:
    """That without checksums."""
    made = behind(runner, "off")
    yield made
    made.close()


def test_a_load_of_other_bytes_than_were_stored_has_failed_and_is_said_once(
    checked: rank.RankTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is done; what came before does not use its warning up."""
    said: list[str] = []
    monkeypatch.setattr(rank.logger, "warning", lambda text, *a: said.append(text % a))
    flip(checked, 1)
    loads = [a_load(at, (3 + at,), (slot,), True) for at, slot in enumerate((0, 1, 1), 1)]
    results = [step(checked, a_plan(loads, stores_done=1))]
    while results[-1].done_on(LOAD) < 3:
        assert results[-1].failed == ()
        results.append(step(checked, None))
    assert (
        results[-1].failed == ((LOAD, 2, MISMATCH), (LOAD, 3, MISMATCH))
        and results[-1].mismatches == 2
    )
    assert (
        len(said) == 1 and "has failed (expected the checksum that the block in CPU slo" in said[0]
    )


def test_no_step_begins_before_what_it_reads_is_known_to_be_right(
    checked: rank.RankTier, runner: Any
) -> None:
    """On a rank that is behind the one that said that it is done."""
    before = runner.kv_caches[0].clone()
    checked.begin_step(a_plan((a_load(1, (4,), (0,), True),), stores_done=1), STEP)
    checked.begin_step(a_plan(wait_load=1, loads_done=1, promised_loads=(1,)), STEP)
    assert torch.equal(runner.kv_caches[0][4], before[1])
    flip(checked, 0)
    checked.begin_step(a_plan((a_load(2, (5,), (0,), True),), loads_done=1), STEP)
    with pytest.raises(RuntimeError, match="expected copy 2 .* .expected the checksum that"):
        checked.begin_step(a_plan(wait_load=2, loads_done=2, promised_loads=(2,)), STEP)


def test_a_load_that_is_not_compared_is_taken_as_it_is(checked: rank.RankTier) -> None:
    flip(checked, 0)
    results = [step(checked, a_plan((a_load(1, (4,), (0,)),), stores_done=1))]
    while results[-1].done_on(LOAD) < 1:
        results.append(step(checked, None))
    assert {(result.failed, result.mismatches) for result in results} == {((), 0)}


def worker_of(tier: rank.RankTier, runner: Any) -> Any:
    setattr(runner, TIER, tier)
    return SimpleNamespace(model_runner=runner)


def test_a_rank_that_is_finished_carries_out_loads_and_closes(
    tier: rank.RankTier, runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[int] = []
    monkeypatch.setattr(tier, "close", lambda: closed.append(1))
    before = runner.kv_caches[0].clone()
    plan = a_plan((a_load(1, (4, 5), (0, 1)),), stores_done=1, wait_load=1, promised_loads=(1,))
    rpc.finish_rank(worker_of(tier, runner), plan)
    assert torch.equal(runner.kv_caches[0][4:6], before[1:3])
    assert closed == [1] and not hasattr(runner, TIER)
    rpc.finish_rank(SimpleNamespace(model_runner=runner), None)
    with pytest.raises(RuntimeError, match="expected this rank's tier to be open, found none"):
        rpc.finish_rank(SimpleNamespace(model_runner=runner), plan)


@pytest.mark.parametrize("promised", [(1,), ()])
def test_a_rank_that_cannot_keep_a_promise_says_so_and_closes(
    promised: tuple[int, ...],
    tier: rank.RankTier,
    runner: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[int] = []
    monkeypatch.setattr(TorchBackend, "load", out_of_memory)
    monkeypatch.setattr(tier, "close", lambda: closed.append(1))
    plan = a_plan((a_load(1, (4, 5), (0, 1)),), stores_done=1, promised_loads=promised)
    worker = worker_of(tier, runner)
    if promised:
        with pytest.raises(RuntimeError, match=r"copy 1 .* failed \(out of memory\)"):
            rpc.finish_rank(worker, plan)
    else:
        rpc.finish_rank(worker, plan)  # a parked load that nobody reads
    assert closed == [1] and hasattr(runner, TIER) == bool(promised)
    if promised:  # the engine may go on, after a client's reset say
        with pytest.raises(
            RuntimeError, match=r"could not be \(.* copy 1 .*\), so a step may lack"
        ):
            getattr(runner, TIER).begin_step(None, STEP)
        rpc.close_rank(worker)
        assert not hasattr(runner, TIER)


def test_a_rank_is_finished_once_its_copies_are_over_and_says_what_failed_until_then(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device they go on beside the host, and bytes are compared when a copy is done."""
    monkeypatch.setattr(copy_engine, "SyncCopyQueue", Behind)
    tier = rank.RankTier(runner, num_slots=5)
    step(tier, a_plan(store=a_store(1, (1,), (0,))))
    assert tier.drain()
    monkeypatch.setattr(TorchBackend, "load", out_of_memory)
    plan = a_plan((a_load(1, (4,), (0,)),), stores_done=1, wait_load=1, promised_loads=(1,))
    with pytest.raises(RuntimeError, match=r"copy 1 .* failed \(out of memory\)"):
        tier.finish(plan)
    tier.close()


def test_a_rank_whose_copies_never_end_begins_no_step_any_more(
    tier: rank.RankTier, runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may still write to blocks that others have by then, whatever they do later."""

    def never(check: object) -> None:
        raise TransferError("copy 1 makes no progress")

    monkeypatch.setattr(tier._engine._all[0].queue, "drain", never)
    with pytest.raises(TransferError):
        rpc.finish_rank(worker_of(tier, runner), None)
    assert tier._host.slots.any(), "nothing was given back"
    with pytest.raises(RuntimeError, match=r"could not be \(copy 1 makes no progress\)"):
        getattr(runner, TIER).begin_step(None, STEP)
    monkeypatch.undo()


def test_a_rank_that_is_wiped_has_made_its_copies_and_keeps_nothing(tier: rank.RankTier) -> None:
    kv = tier._runner.kv_caches[0]
    tier.begin_step(a_plan((a_load(1, (4,), (0,)),), wait_load=0, stores_done=1), STEP)
    assert tier._host.slots.any()
    rpc.wipe_rank(SimpleNamespace(model_runner=SimpleNamespace(**{TIER: tier})))
    assert not tier._host.slots.any() and torch.equal(kv[4], kv[1])
    tier.end_step(SimpleNamespace(sampled_token_ids=[[1]], req_ids=["a"]))
    step(tier, a_plan(store=a_store(2, (3,), (0,))))
    assert tier._host.slots[0].any() and not tier._host.slots[1:].any()


def test_a_rank_makes_the_copies_under_way_before_it_is_wiped_and_before_it_is_smaller(
    late: rank.RankTier,
) -> None:
    kv = late._runner.kv_caches[0]
    wanted = kv.clone()
    late.begin_step(a_plan(store=a_store(2, (2, 3), (2, 4))), STEP)
    late.drain()
    late.begin_step(a_plan((a_load(1, (5, 6), (0, 4)),), stores_done=2), STEP)
    assert torch.equal(kv, wanted), "nothing is loaded yet"
    late.resize(2, sizing=1)
    assert torch.equal(kv[5], wanted[1]) and torch.equal(kv[6], wanted[3])
    plan = a_plan((a_load(2, (4,), (1,)),), store=a_store(3, (3,), (0,)))
    late.begin_step(plan, STEP)
    assert torch.equal(kv[4], wanted[4]), "nor this"
    late.wipe()
    assert torch.equal(kv[4], wanted[2])
    late.drain()
    assert not late._host.slots.any(), "nothing is stored afterwards"


def test_a_rank_that_is_resized_finishes_its_copies_and_says_what_it_has(
    tier: rank.RankTier,
) -> None:
    result = step(tier, a_plan(store=a_store(2, (3,), (2,))))
    assert (result.num_slots, result.growing, result.sizing) == (5, False, 0)
    assert tier.resize(2, sizing=1) == (2, False)
    result = step(tier, a_plan((a_load(1, (4, 5), (0, 1)),), wait_load=1, stores_done=2))
    assert (result.num_slots, result.growing, result.sizing) == (2, False, 1)
    kv = tier._runner.kv_caches[0]
    assert torch.equal(kv[4], kv[1]) and torch.equal(kv[5], kv[2])
    assert tier.resize(5, sizing=2) == (5, False)
    result = step(tier, None)
    assert (result.num_slots, result.growing, result.sizing) == (5, False, 2)


def test_kvcacheds_tensors_are_read_and_tried_only_where_they_have_memory(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvcached, "has_tensors", lambda: True)
    monkeypatch.setattr(kvcached, "page_bytes", lambda: 200)
    spec = SimpleNamespace(page_size_bytes=60)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=[])
    runner.kv_cache_config.kv_cache_groups = [group]
    runner.kv_caches = [torch.arange(750.0).reshape(50, 3, 5)]
    before = runner.kv_caches[0].clone()
    layout = block_layout(runner)
    assert (layout.num_blocks, layout.num_backed, layout.block_bytes) == (50, 3, 60)
    made = rank.RankTier(runner, num_slots=5)
    step(made, a_plan(store=a_store(1, (41, 42), (0, 1))))
    runner.kv_caches[0][3] = 0
    step(made, a_plan([a_load(1, (3,), (0,))], wait_load=1, stores_done=1))
    made.close()
    assert torch.equal(runner.kv_caches[0][3], before[41])
    spec.page_size_bytes = 200  # more than that page has
    runner.kv_caches = [torch.zeros(50, 10, 5)]
    assert block_layout(runner).num_backed == 1


def test_a_step_that_is_interrupted_is_the_last(
    tier: rank.RankTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Ctrl-C in a process that goes on: its blocks are in the prefix cache."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TorchBackend, "load", interrupted)
    plan = a_plan((a_load(1, (4,), (0,)),), stores_done=1, wait_load=1, promised_loads=(1,))
    with pytest.raises(KeyboardInterrupt):
        tier.begin_step(plan, STEP)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="no step after one that has failed"):
        tier.begin_step(None, STEP)


@pytest.mark.parametrize("where", ["begin_step", "end_step", "poll"])
def test_after_an_interrupt_a_rank_can_be_finished(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine does that before the next step, and who goes on has plain vLLM."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    runner = small_runner()
    made, kv = rank.RankTier(runner, num_slots=5), runner.kv_caches[0]
    step(made, a_plan(store=a_store(1, (1, 2), (0, 1))))
    with monkeypatch.context() as patched:
        patched.setattr(made._engine, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(made, a_plan((a_load(1, (4,), (0,)),), wait_load=1, stores_done=1))
    rpc.finish_rank(worker_of(made, runner), None)
    assert not hasattr(runner, TIER), "its steps are plain vLLM's"
    assert torch.equal(kv[4], kv[1]) == (where != "begin_step")


def test_what_a_copy_may_still_use_is_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(check: object) -> None:
        raise TransferError("copy 1 makes no progress")

    monkeypatch.setattr(rpc, "_NOT_FREED", [])
    runner = small_runner()
    made = rank.RankTier(runner, num_slots=5)
    link, host = weakref.ref(made._engine._all[0]), weakref.ref(made._host)
    made._engine._all[0].queue.drain = never
    worker = worker_of(made, runner)
    del made
    with pytest.raises(TransferError):
        rpc.finish_rank(worker, None)
    gc.collect()
    assert link() is not None and host() is not None
