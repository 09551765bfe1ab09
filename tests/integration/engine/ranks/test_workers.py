"""All ranks of an engine: how many slots, whether they fit, and what one rank says of itself."""

from __future__ import annotations

import dataclasses
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from integration.worker.runners import small_runner  # noqa: E402
from tier.plans import a_load, a_plan, a_store  # noqa: E402

from kvoffload_patch import __version__, launch_token  # noqa: E402
from kvoffload_patch.integration.engine.ranks import workers as ranks_module  # noqa: E402
from kvoffload_patch.integration.engine.ranks.workers import RankGroup  # noqa: E402
from kvoffload_patch.integration.errors import TierRefused  # noqa: E402
from kvoffload_patch.integration.protocol import RESULT, TIER, RankGeometry, RankOpened  # noqa: E402  # noqa: E402
from kvoffload_patch.integration.slot_counts import SlotCounts, make_slot_counts  # noqa: E402
from kvoffload_patch.integration.worker import rpc  # noqa: E402
from kvoffload_patch.integration.worker import tier as worker_side  # noqa: E402
from kvoffload_patch.integration.worker.memory import EARLY  # noqa: E402
from kvoffload_patch.transfer.memory.host_buffer import HostBuffer  # noqa: E402

GIB = 1 << 30


def geometry(rank: int, host: str = "a", **more: Any) -> RankGeometry:
    given = {"block_bytes": 100, "slot_bytes": 512, "num_blocks": 7, "device": "cuda"}
    given |= {"available_bytes": 2 * GIB, "version": __version__}
    return RankGeometry(rank, host, 1000 + rank, **{**given, **more})


class Executor:
    """Answers as it is told to, by the name of what is called."""

    def __init__(self, ranks: list[RankGeometry], ready: list[int]) -> None:
        self.answers = {
            "describe_rank": [dataclasses.replace(r, of_ranks=len(ranks)) for r in ranks],
            "open_rank": [RankOpened(r.rank, r.pid, n, n > 5, 0.5) for r, n in zip(ranks, ready)],
            "can_share": [(True, True) for _ in ready],
        }
        self.calls: list[tuple[Any, ...]] = []

    def collective_rpc(self, function: Any, timeout: float, args: tuple[Any, ...]) -> Any:
        self.calls.append((function.__name__, *args))
        if function.__name__ == "close_rank":
            return []
        return [(True, answer) for answer in self.answers[function.__name__]]


def test_slots_are_counted_by_what_they_take_and_usable_where_every_rank_has_them() -> None:
    executor = Executor([geometry(0), geometry(1, slot_bytes=1024)], [9, 4])
    ranks = RankGroup(executor)
    ranks.open(1536 * 20 + 1)
    assert (ranks.num_slots, ranks.num_usable) == (20, 4)
    assert executor.calls[-1][:2] == ("open_rank", 20)
    assert ranks.growing, "one of them says so"


def test_several_ranks_are_told_where_they_share_what_they_have() -> None:
    executor = Executor([geometry(0), geometry(3)], [9, 4])
    RankGroup(executor).open(512 * 40)
    (_, asked, _), (_, *told) = executor.calls[-2:]
    assert asked is told[-4] and asked.ranks == (0, 3)
    assert not asked.is_reachable(), "its name is taken away when all have opened it"


def test_ranks_that_share_no_memory_do_not_grow_while_they_serve() -> None:
    executor = Executor([geometry(0), geometry(1, "b")], [5, 4])
    executor.answers["can_share"] = [(True, True), (False, True)]
    ranks = RankGroup(executor)
    ranks.open(512 * 40)
    assert executor.calls[-1][-4:-1] == (None, [], False)
    assert (ranks.num_usable, ranks.growing) == (4, False)


def test_one_rank_shares_with_nobody() -> None:
    executor = Executor([geometry(0)], [9])
    ranks = RankGroup(executor)
    ranks.open(512 * 20)
    assert [call[0] for call in executor.calls] == ["describe_rank", "open_rank"]
    assert executor.calls[1][-4:-1] == (None, [], False) and ranks.growing


def test_a_board_whose_ranks_do_not_answer_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(
        ranks_module, "make_slot_counts", lambda r: made.append(make_slot_counts(r)) or made[0]
    )
    executor = Executor([geometry(0), geometry(1)], [1, 1])
    del executor.answers["can_share"], executor.answers["open_rank"]
    with pytest.raises(TierRefused, match="expected every worker to answer can_share"):
        RankGroup(executor).open(512 * 40)
    assert len(made) == 1 and not made[0].address.is_reachable()


def test_memory_taken_early_is_not_counted_twice() -> None:
    MIB = 1 << 20
    early = {"available_bytes": GIB + 100 * MIB, "early_bytes": 30 * MIB, "slot_bytes": MIB}
    both = [geometry(0, **early), geometry(1, **early)]
    RankGroup(Executor(both, [1, 1])).open(160 * MIB)
    with pytest.raises(TierRefused, match="would take 0.2 GiB on a, where 0.2 GiB fit: 1.2 GiB"):
        RankGroup(Executor(both, [1, 1])).open(162 * MIB)
    apart = [geometry(0, **early), geometry(1, "b", **early)]
    RankGroup(Executor(apart, [1, 1])).open(260 * MIB)
    with pytest.raises(TierRefused, match="on a, where 0.1 GiB fit: 1.1 GiB"):
        RankGroup(Executor(apart, [1, 1])).open(262 * MIB)


def test_an_automatic_tier_takes_its_share_of_the_host_that_can_give_least() -> None:
    MIB = 1 << 20
    much = {"available_bytes": 99 * GIB, "slot_bytes": MIB, "early_bytes": GIB}
    ranks = RankGroup(
        Executor([geometry(0, **much, shareable_bytes=8 * GIB), geometry(1, **much)], [1, 1])
    )
    with pytest.raises(TierRefused, match="at least one block .*, found auto"):
        ranks.open(None, engines=1 << 20)  # a share that is not even a block
    with pytest.raises(TierRefused, match="block of 0.00195 GiB over all ranks, found 9.97e-08; "):
        ranks.open(107)
    both = [geometry(0, **much, shareable_bytes=8 * GIB), geometry(1, **much)]
    both = [dataclasses.replace(r, shareable_bytes=8 * GIB) for r in both]
    ranks = RankGroup(Executor(both, [1, 1]))
    ranks.open(None)
    assert ranks.num_slots == 2560, "half of ten GiB over two ranks"
    assert ranks.size == (
        "5.00 GiB over all ranks, chosen: 1/2 of the 10.0 GiB that a can give, "
        "1 GiB of which stay free"
    )
    ranks.open(None, engines=4)
    assert ranks.num_slots == 640 and "1/8 of the 10.0 GiB" in ranks.size
    apart = [both[0], dataclasses.replace(both[1], host="b", shareable_bytes=2 * GIB)]
    apart.append(dataclasses.replace(both[1], host="c"))
    ranks = RankGroup(Executor(apart, [1, 1, 1]))
    ranks.open(None)
    assert ranks.num_slots == 1536 and "3.0 GiB that b can give" in ranks.size


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_reserve_stays_free_on_every_device(device: str) -> None:
    rank = geometry(0, available_bytes=GIB + 512 * 20, device=device)
    RankGroup(Executor([rank], [1])).open(512 * 20)
    with pytest.raises(TierRefused, match="1.0 GiB are available, of which 1 GiB stay free; lower"):
        RankGroup(Executor([rank], [1])).open(512 * 21)


def test_giving_back_asks_every_rank_and_forgives_those_that_do_not_answer() -> None:
    executor = Executor([], [])
    RankGroup(executor).give_back()
    assert executor.calls == [("close_rank",)]
    RankGroup(SimpleNamespace()).give_back()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker on the CPU with seven blocks of KV."""
    monkeypatch.setattr(rpc, "runner_is_patched", lambda runner: "")
    runner = small_runner()
    return SimpleNamespace(rank=0, model_runner=runner, vllm_config=runner.vllm_config)


def output() -> Any:
    return SimpleNamespace(req_ids=["a"], sampled_token_ids=[[1]])


def test_a_rank_says_what_a_slot_takes_and_what_is_usable(worker: Any) -> None:
    described = rpc.describe_rank(worker)
    assert (described.error, described.block_bytes, described.slot_bytes) == ("", 60, 512)
    assert described.of_ranks == 1
    worker.vllm_config.parallel_config.pipeline_parallel_size = 2
    assert rpc.describe_rank(worker).of_ranks == 2
    worker.vllm_config.parallel_config.pipeline_parallel_size = 1
    opened = rpc.open_rank(worker, 5)
    assert (opened.error, opened.num_ready, opened.growing) == ("", 5, False)
    tier = getattr(worker.model_runner, TIER)
    assert getattr(tier.end_step(output()), RESULT).num_slots == 5
    rpc.close_rank(worker)
    assert not hasattr(worker.model_runner, TIER)


def test_one_of_several_ranks_speaks_for_all(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    worker.vllm_config.parallel_config.tensor_parallel_size = 2
    board = make_slot_counts([0, 1])
    assert board is not None
    other = SlotCounts(board.address, 1)
    other.exchange(2, True)
    assert rpc.can_share(worker, board.address) == (True, True)
    assert rpc.open_rank(worker, 5, board=board.address).error == ""
    board.close()
    tier = getattr(worker.model_runner, TIER)

    def said() -> tuple[int, bool]:
        result = getattr(tier.end_step(output()), RESULT)
        return result.num_slots, result.growing

    assert said() == (2, True)
    assert other.exchange(9, True) == (5, False), "this rank has five, and is not to have more"
    assert said() == (5, False)
    monkeypatch.setattr(SlotCounts, "exchange", None)
    assert said() == (5, False), "nothing is written or read any more"
    rpc.close_rank(worker)


def test_ranks_that_share_nothing_wait_until_all_slots_are_there(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[int] = []
    monkeypatch.setattr(HostBuffer, "wait_up_to", lambda _, slots: waited.append(slots) or slots)
    worker.vllm_config.parallel_config.tensor_parallel_size = 2
    rpc.open_rank(worker, 5)
    assert waited == [5]
    result = getattr(getattr(worker.model_runner, TIER).end_step(output()), RESULT)
    assert result.num_slots is None, "the others may have fewer"
    rpc.close_rank(worker)


def test_a_rank_that_is_open_ends_the_watch_of_its_launch(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a host that has workers only there is no engine to do so."""
    confirmed: list[str] = []
    monkeypatch.setattr(launch_token, "confirm", confirmed.append)
    assert rpc.describe_rank(worker).version == __version__ and not confirmed
    opened = rpc.open_rank(worker, 4)
    assert opened.error == "" and confirmed == [launch_token.ATTACHED]
    rpc.close_rank(worker)


def test_a_board_that_cannot_be_opened_is_said(worker: Any) -> None:
    board = make_slot_counts([0, 1])
    assert board is not None
    board.close()
    assert "No such file" in rpc.open_rank(worker, 5, board=board.address).error
    assert not hasattr(worker.model_runner, TIER)


def test_a_rank_that_cannot_take_part_says_why(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "runner_is_patched", lambda runner: "its runner is not patched")
    assert rpc.describe_rank(worker).error == "its runner is not patched"
    monkeypatch.setattr(rpc, "runner_is_patched", lambda runner: "")
    del worker.model_runner.kv_caches
    described = rpc.describe_rank(worker)
    assert "kv_caches" in described.error and described.version == __version__
    with pytest.raises(TierRefused, match="kv_caches"):
        RankGroup(Executor([described], [1])).open(512)


def test_a_rank_without_a_tier_knows_of_no_copy_that_is_done(worker: Any) -> None:
    """So what a reset finds on the GPU may lack what a copy should have brought."""
    assert rpc.drain_rank(worker) is False
    rpc.open_rank(worker, 4)
    assert rpc.drain_rank(worker) is True
    rpc.close_rank(worker)


def test_weights_that_cannot_be_compared_have_no_digest(worker: Any) -> None:
    def no_memory() -> Any:
        raise RuntimeError("out of memory")

    worker.model_runner.get_model = no_memory
    assert rpc.digest_weights(worker) == ""


def executor_of(module: str, **own: Any) -> type[Executor]:
    """A class of executors that a module of this name defines."""
    return type("Executor", (Executor,), {"__module__": module, **own})


MULTIPROC = executor_of("vllm.v1.executor.multiproc_executor")
HERE = {"driver_worker": object()}


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (MULTIPROC, rpc.end_process),
        (executor_of("vllm.v1.executor.ray_distributed_executor"), rpc.end_process),
        (type("Own", (MULTIPROC,), {}), rpc.end_process),
        (executor_of("vllm.v1.executor.uniproc_executor", **HERE), "this process"),
        (executor_of("trainer.executor"), None),
    ],
    ids=["a process each", "Ray's", "derived from one", "this process", "a user's"],
)
def test_a_rank_is_told_how_to_end_its_process_if_that_is_vllms_own(
    kind: type[Executor], wanted: Any
) -> None:
    """This process is the engine core's, or the user's: what attaches the tier knows it."""

    def end() -> None:
        raise AssertionError

    for own in (end, None):
        executor = kind([geometry(0)], [9])
        RankGroup(executor, own).open(512 * 20)
        assert executor.calls[1][-1] == (own if wanted == "this process" else wanted)


@pytest.mark.parametrize(
    ("kind", "beside"),
    [
        (executor_of("vllm.v1.executor.ray_distributed_executor"), True),
        (type("Own", (executor_of("vllm.v1.executor.ray_executor"),), {}), True),
        (executor_of("vllm.v1.executor.ray_executor_v2"), False),
        (MULTIPROC, False),
    ],
    ids=["Ray's up to 0.10", "derived from Ray's", "Ray's second", "a process each"],
)
def test_which_workers_carry_out_calls_beside_steps(kind: type[Executor], beside: bool) -> None:
    assert RankGroup(kind([geometry(0)], [9])).beside_steps == beside


def test_the_end_of_a_process_reaches_the_watch_of_its_copies(worker: Any) -> None:
    assert rpc.open_rank(worker, 5, end=rpc.end_process).error == ""
    assert getattr(worker.model_runner, TIER)._engine._end is rpc.end_process
    rpc.close_rank(worker)
    assert pickle.loads(pickle.dumps(rpc.end_process)) is rpc.end_process, "vLLM sends it so"


def test_cpu_memory_that_is_being_registered_is_told_of_each_step(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rpc.open_rank(worker, 5)
    tier = getattr(worker.model_runner, TIER)
    told: list[Any] = []
    monkeypatch.setattr(tier._host, "step_begins", lambda *what: told.append(what))
    tier.load_ms_per_block = 2.0
    step = SimpleNamespace(total_num_scheduled_tokens=1, num_scheduled_tokens={"a": 1})
    tier.begin_step(None, step)
    assert told == [], "all of it is usable"
    tier._growth_told = False
    tier.begin_step(None, step)
    loads = (a_load(1, (0, 1), (0, 1)), a_load(2, (2,), (2,)))
    store = a_store(1, (3, 0), (4, 3))
    tier.begin_step(a_plan(loads, store, wait_load=2), step)
    assert told == [(0.0, -1), (0.006, 4)], "how long its loads take, how far it stores"
    monkeypatch.setattr(tier._host, "step_ends", lambda: told.append("launched"))
    tier.end_step(output())
    assert told[2:] == ["launched"]
    rpc.close_rank(worker)


@pytest.mark.parametrize("why", ["no more memory; lower KVOFFLOAD_CPU_GIB.", ""])
def test_the_end_of_growth_is_said_once(
    why: str, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(worker_side.logger, "warning", lambda text, *a: said.append(text % a))
    monkeypatch.setenv("KVOFFLOAD_OPTIONS", "KVOFFLOAD_CPU_GIB")
    told: list[str] = []
    monkeypatch.setattr(worker_side.logger, "info", lambda text, *a: told.append(text % a))
    ended, ready = [""], [2]
    monkeypatch.setattr(HostBuffer, "growth_ended", property(lambda self: ended[0]))
    monkeypatch.setattr(HostBuffer, "num_ready", property(lambda self: ready[0]))
    monkeypatch.setattr(HostBuffer, "growth_spent", "1.0 s waiting for pages.")
    rpc.open_rank(worker, 5)
    tier = getattr(worker.model_runner, TIER)
    tier.end_step(output())
    assert said == told == []
    ended[0], ready[0] = (why, 3) if why else ("", 5)
    for _ in range(3):
        assert getattr(tier.end_step(output()), RESULT).num_slots == ready[0]
    if why:
        assert (said, told) == (["kvoffload_patch: no more memory; lower --cpu-gib."], [])
    else:
        assert said == [] and len(told) == 1
        assert told[0].startswith("kvoffload_patch: all 5 CPU slots are usable, seen 0.")
        assert told[0].endswith(": 1.0 s waiting for pages.")
    rpc.close_rank(worker)


def test_closing_a_rank_that_never_opened_gives_back_what_was_taken_early(worker: Any) -> None:
    closed: list[int] = []
    early = SimpleNamespace(close=lambda: closed.append(1), toucher=SimpleNamespace(touched=77))
    setattr(worker.model_runner, EARLY, early)
    assert rpc.describe_rank(worker).early_bytes == 77
    rpc.close_rank(worker)
    assert closed == [1] and not hasattr(worker.model_runner, EARLY)


def test_every_rank_is_resized_and_the_least_of_them_counts() -> None:
    executor = Executor([geometry(0), geometry(1, slot_bytes=1024)], [9, 4])
    ranks = RankGroup(executor)
    ranks.open(1536 * 20)
    assert ranks.slot_bytes == 1536
    executor.answers["resize_rank"] = [(6, False), (5, True)]  # type: ignore[list-item]
    assert ranks.resize(7, 3) == (5, True)
    assert executor.calls[-1] == ("resize_rank", 7, 3)


def test_every_rank_is_wiped_and_one_that_is_not_is_said() -> None:
    executor = Executor([geometry(0), geometry(1)], [9, 4])
    ranks = RankGroup(executor)
    ranks.open(1536 * 20)
    executor.answers["wipe_rank"] = [None, None]
    ranks.wipe()
    assert executor.calls[-1] == ("wipe_rank",)


def test_more_slots_need_room_on_every_host_beside_the_reserve() -> None:
    members = [geometry(0), geometry(1), geometry(2, host="b", available_bytes=3 * GIB)]
    ranks = RankGroup(Executor(members, [9, 9, 9]))
    ranks.check_room(1 << 20)  # two ranks of 512 B each: 1 GiB, and 1 GiB stays free
    with pytest.raises(TierRefused, match="expected 2.0 GiB available on a, .* found 2.0 GiB"):
        ranks.check_room((1 << 20) + 1)


def test_ranks_that_share_nothing_wait_for_their_slots_when_they_are_resized(worker: Any) -> None:
    worker.vllm_config.parallel_config.tensor_parallel_size = 2
    rpc.open_rank(worker, num_slots=6)
    tier = getattr(worker.model_runner, TIER)
    assert rpc.resize_rank(worker, 4, 1) == (4, False)
    assert tier._usable_slots() == (None, False)
    rpc.close_rank(worker)


def test_a_rank_that_shares_a_board_says_what_all_have_once_all_are_resized(worker: Any) -> None:
    board = make_slot_counts([worker.rank, worker.rank + 1])
    assert board is not None
    other = SlotCounts(board.address, worker.rank + 1)
    rpc.open_rank(worker, num_slots=6, board=board.address)
    board.close()
    tier = getattr(worker.model_runner, TIER)
    other.exchange(6, False)
    assert tier._usable_slots() == (6, False)
    assert rpc.resize_rank(worker, 3, 1) == (3, False)
    other.exchange(3, False)
    assert rpc.resize_rank(worker, 5, 2) == (5, False)
    other.exchange(5, False)  # between this rank's answer and its next step
    assert tier._usable_slots() == (5, False)
    rpc.close_rank(worker)


def test_of_what_open_ranks_say_that_counts_which_holds_for_all() -> None:
    executor = Executor([geometry(0), geometry(1)], [9, 9])
    fast = RankOpened(0, 1000, 9, False, 0.5, "in one piece", 0.75, True)
    slow = RankOpened(1, 1001, 9, False, 2.0, "by kernels", 0.5, True)
    executor.answers["open_rank"] = [fast, slow]
    ranks = RankGroup(executor)
    ranks.open(512 * 40, by_layer=True)
    assert executor.calls[-1][-2] is True
    assert (ranks.load_ms_per_block, ranks.copies, ranks.overlap) == (2.0, "by kernels", 0.5)
    assert ranks.compares and ranks.copies_overlap
    executor.answers["open_rank"][0] = dataclasses.replace(fast, compares=False)
    ranks.open(512 * 40)
    assert not ranks.compares
    on_cpu = RankGroup(Executor([geometry(0, device="cpu")], [9]))
    on_cpu.open(512 * 20)
    assert not on_cpu.copies_overlap


def test_a_rank_that_could_not_open_its_tier_is_named() -> None:
    executor = Executor([geometry(0), geometry(1)], [9, 9])
    executor.answers["open_rank"][1] = RankOpened(1, 1001, error="no memory is left")
    said = r"rank 1 \(pid 1001\) failed to open the CPU tier: no memory is left"
    with pytest.raises(TierRefused, match=said):
        RankGroup(executor).open(512 * 40)


@pytest.mark.parametrize(("here", "silent", "closed"), [(1, 0, 1), (1, 1, 0), (0, 0, 0)])
def test_only_a_worker_of_this_process_that_answers_is_closed_with_the_engine(
    here: bool, silent: bool, closed: bool
) -> None:
    """An engine after it needs the memory; those in others give it back by ending."""
    executor = Executor([geometry(0)], [9])
    if here:
        executor.driver_worker = object()  # type: ignore[attr-defined]
    ranks = RankGroup(executor)
    ranks.silent = silent
    ranks.close()
    assert executor.calls == [("close_rank",)] * closed


def test_the_end_of_a_tier_that_has_failed_on_one_rank_is_no_end_of_it() -> None:
    """A load that a step was promised may have failed there."""
    executor = Executor([geometry(0), geometry(1)], [9, 9])
    answers = [(True, None), (False, "RuntimeError: it has failed")]
    executor.collective_rpc = lambda *_, **__: answers  # type: ignore[method-assign]
    said = "to answer finish_rank, found RuntimeError: it has failed on 1 of 2"
    with pytest.raises(TierRefused, match=said):
        RankGroup(executor).finish(None)
