"""vLLM's own scheduler, synchronous or not, with a tier, over a model that is arithmetic.

One wrong block anywhere in what a request's attention sees is a wrong token. Loads and stores
move the model's values, as late as the plans allow, and fail when they are told to.
"""

from __future__ import annotations

import inspect
import json
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

from packaging.version import Version
from scheduler_half import parts
from scheduler_half.device import BLOCK, Device, answer
from scheduler_half.drafts import Drafter
from scheduler_half.replay import Replay

from kvoffload_patch.config import Settings
from kvoffload_patch.control.commands import Command
from kvoffload_patch.integration import kvcached
from kvoffload_patch.integration.engine.attach import connect
from kvoffload_patch.integration.engine.control import Asked, Desk
from kvoffload_patch.integration.patch_table.points import POINTS, VLLM
from kvoffload_patch.integration.protocol import PLAN, RESULT
from kvoffload_patch.patching import (
    Decision,
    ObjectHooks,
    decide,
    find_source,
    installed_version,
)
from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.policies import POLICIES

__all__ = ["BLOCK", "FakeRanks", "Mini"]

_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32",
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 32_000,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip

SLOT_BYTES = 1 << 20

# The configuration is shared by all of a process.
_LIMITS = {"watermark": 0.0, "enable_chunked_prefill": True, "long_prefill_token_threshold": 0}


class FakeRanks:
    """One rank; its device carries out the plans."""

    def __init__(
        self,
        load_ms_per_block: float = 1.0,
        copies_overlap: bool = True,
        overlap: float = 0.0,
        compares: bool = False,
    ) -> None:
        self.load_ms_per_block, self.copies_overlap = load_ms_per_block, copies_overlap
        self.overlap, self.compares, self.sharing = overlap, compares, 1
        self.device: Device | None = None
        self.drains = self.closed = 0
        self.block_bytes = self.slot_bytes = SLOT_BYTES
        self.num_slots = 400  # that the tier was opened with
        self.copies, self.told_of_all = "by hand", True
        self.asleep, self.version = False, 0  # of the weights
        self.step_failure, self.beside_steps, self.silent = str, False, False

    def check_room(self, more: int) -> None:
        """There is room for everything."""

    def resize(self, num_slots: int, sizing: int) -> tuple[int, bool]:
        """Every copy is made, and memory behind the slots is given back."""
        if self.device is not None:
            self.device.drain()
            for slot in self.device.slots[num_slots:]:
                slot[:] = [0] * len(slot)
        return num_slots, False

    def weights(self) -> tuple[str, ...]:
        """A digest."""
        return (f"weights {self.version}",)

    def drain(self) -> bool:
        """Every copy is made; whether none has failed that was not told."""
        self.drains += 1
        if self.device is None:
            return True
        self.device.drain()
        return not self.device.failures

    def wipe(self) -> None:
        """Every copy is made, and nothing of it is left in CPU memory."""
        if self.device is not None:
            self.device.drain()
            for slot in self.device.slots:
                slot[:] = [0] * len(slot)

    def finish(self, plan: Any) -> None:
        """Carry out the plan's loads, and every copy; the rank is closed."""
        self.closed += 1
        if self.device is not None:
            self.device.finish(plan)

    def close(self) -> None:
        self.closed += 1


class Mini:
    """An engine core in small.

    Args:
        fails: called with ("load" or "store", ticket): whether that copy fails.
        in_flight: steps under way at once.
        asynchronous: whether vLLM's asynchronous scheduler takes part; as a rule with more than one
            step under way. The other one has several with pipeline stages.
        late: outputs after which a copy is carried out that nobody waits for.
        settings: of the tier.
        blocks: GPU blocks, the null block included.
        grows: CPU slots that become usable with each output, until all are; 0: all are at once.
        windows: a KV cache group for each: its sliding window, or None for full attention.
        tier: whether there is one.
        policy: of the waiting queue.
        step_ms: what the tier's clock says that a step takes.
        lookahead: tokens behind a step's own for which vLLM takes blocks as well.
        limits: fields of vLLM's scheduler configuration, instead of `_LIMITS`.
        max_failed_copies: more detach the tier; so many that none do, unless told otherwise.
        shards: ranks that each hold a part of every block's tokens.
        weighs: `auto` weighs whether being lazy pays, as in an engine; or else it always is lazy.
        events: whether vLLM's KV cache events are on; they are compared with both caches then.
        drafter: of tokens; None: each step has only known ones.
        retention, unit: of `parts`.
    """

    def __init__(
        self,
        fails: Callable[[str, int], bool] = lambda direction, ticket: False,
        in_flight: int = 1,
        late: int = 0,
        blocks: int = 25,
        num_slots: int = 400,
        grows: int = 0,
        ranks: FakeRanks | None = None,
        windows: Sequence[int | None] = (None,),
        tier: bool = True,
        policy: str = "fcfs",
        step_ms: float = 0.0,
        lookahead: int = 0,
        limits: dict[str, Any] | None = None,
        max_failed_copies: int = 1 << 30,
        asynchronous: bool | None = None,
        events: bool = False,
        shards: int = 1,
        weighs: bool = True,
        drafter: Drafter | None = None,
        retention: int | None = None,
        unit: int = 0,
        **settings: Any,
    ) -> None:
        self.in_flight = in_flight
        self.device = Device(blocks, num_slots, tuple(windows), late, fails, shards, drafter, unit)
        self.config = Release.config(1 if asynchronous is False else in_flight, shards)
        for name, value in {**_LIMITS, **(limits or {}), "policy": policy}.items():
            setattr(self.config.scheduler_config, name, value)
        self._make_scheduler(blocks, windows, lookahead, retention=retention, unit=unit)
        self.replay = Replay(self.scheduler) if events else None
        self.ranks = ranks or FakeRanks()
        self.ranks.device, self.ranks.num_slots = self.device, num_slots
        self.max_failed_copies = max_failed_copies
        self.time, self.step_ms, self.resets = 0.0, step_ms, 0
        self._grows, self._usable = grows, grows or num_slots
        self._weighs = weighs
        self._attach(Settings(**settings), tier)
        self._begin_records()

    def _begin_records(self) -> None:
        self.desk: Desk | None = None
        self.answers: dict[str, list[int]] = {}
        self.prompts: dict[str, list[int]] = {}
        self.counts: dict[str, int] = {}
        self.plans, self.how = list[Any](), dict[str, Any]()  # arguments of `schedule`
        self.hits: dict[str, int] = {}  # tokens cached when a request was admitted, in that order
        self.queue: deque[tuple[Any, Any]] = deque()

    def _make_scheduler(
        self, blocks: int, windows: Sequence[int | None], lookahead: int, **more: Any
    ) -> None:
        self.config.speculative_config = self.device.drafter
        self.scheduler = parts.make_scheduler(self.config, blocks, windows, **more)
        self.scheduler.num_lookahead_tokens += lookahead
        self.kv_manager = self.scheduler.kv_cache_manager
        self.pool = self.kv_manager.block_pool

    def _attach(self, settings: Settings, tier: bool) -> None:
        self.manager = OffloadManager(
            self._usable, POLICIES[settings.eviction], bool(self._grows), settings.store,
            settings.store_min_uses, len(self.pool.blocks) if self._weighs else 0,
        )  # fmt: skip
        self.tier: Any = None
        if not tier:
            return
        owners = {
            "Scheduler": self.scheduler,
            "KVCacheManager": self.kv_manager,
            **kvcached.owners_of(self.pool),
        }
        self.before = self.changed()
        self.hooks = ObjectHooks(kvcached.with_pool(Release.decision(), self.pool), owners)
        self.breaker = connect(
            self.scheduler, self.hooks, self.manager, self.ranks, settings, lambda: self.time
        )
        self.breaker.max_failed_copies = self.max_failed_copies
        self.breaker.steps_under_way = lambda: len(self.queue)
        self.tier, self.view = self.breaker.tier, self.breaker.tier._view
        # What a token takes to compute on this device says nothing beside what a load takes.
        self.tier.pace._prefills = deque(maxlen=0)

    def changed(self) -> dict[str, Any]:
        """What a tier changes of vLLM's objects, but for blocks and requests."""
        scheduler, coordinator = self.scheduler, self.kv_manager.coordinator
        names = "max_num_running_reqs", "max_num_active_reqs", "connector_prefix_cache_stats"
        holders = [coordinator, *coordinator.single_type_managers]
        return {
            "attributes": [set(vars(o)) for o in (scheduler, self.kv_manager, self.pool, *holders)],
            "values": [getattr(scheduler, name, None) for name in names],
            "log_stats": self.kv_manager.log_stats,
            "pools": [id(holder.block_pool) for holder in holders],
        }

    # What a user does

    def add(self, prompt: list[int], count: int = 4, priority: int = 0, **more: Any) -> str:
        """Ask for ``count`` tokens; returns the request's name. ``more``: of `make_request`."""
        name, hashed = f"request-{len(self.prompts)}", self.device.hashed
        request = parts.make_request(name, list(prompt), count, priority, *hashed, **more)
        self.prompts[name], self.answers[name], self.counts[name] = list(prompt), [], count
        self.scheduler.add_request(request)
        return name

    def abort(self, *names: str) -> None:
        """These requests, or all, are not wanted any more."""
        from vllm.v1.request import RequestStatus

        gone = names[0] if len(names) == 1 else list(names) or None
        self.scheduler.finish_requests(gone, RequestStatus.FINISHED_ABORTED)
        self.counts.update(dict.fromkeys(names or self.counts, 0))

    def only_in_cpu(self, *prompts: list[int]) -> None:
        """Compute prompts, store them, and lose them on the GPU."""
        for prompt in prompts:
            self.add(prompt, count=1)
            while self.scheduler.has_requests() or self.queue:  # also to tell that it has ended
                self.step()
        self.settle()
        self.pool.free_blocks(self.pool.get_new_blocks(self.pool.get_num_free_blocks()))

    def ask(self, name: str, **values: Any) -> Asked:
        """Ask for a command over the control socket, for the next step to carry out."""
        if self.desk is None:
            self.desk = Desk(self.breaker, self.manager, self.ranks, {}, lambda: None)
        asked = Asked(Command(name, values))
        self.breaker.asked.append(asked)
        return asked

    def settle(self) -> None:
        """Every copy is done, and the tier knows it."""
        self.device.drain()
        if self.tier is not None and not self.breaker.detached:
            self.tier.on_result(self.manager.drained())

    def run(self, steps: int = 10_000) -> None:
        """Step until every request has its answer."""
        while self.scheduler.has_unfinished_requests() or self.queue:
            assert steps, "the requests do not come to an end"
            steps -= 1
            self.step()

    def check(self) -> None:
        """Every token that came out is right, and all came out that were asked for."""
        assert self.only_right_tokens()
        for name, tokens in self.answers.items():
            request = self.scheduler.requests.get(name)
            assert request is None, f"{name} is still there"
            assert len(tokens) >= self.counts[name], f"{name} has {len(tokens)} tokens"

    def only_right_tokens(self) -> bool:
        """Whether every token that came out is right, as far as the requests have come."""
        return all(
            tokens == answer(self.prompts[name], len(tokens))
            for name, tokens in self.answers.items()
        )

    # A step

    def step(self) -> None:
        """As `EngineCore.step_with_batch_queue`: schedule, and take in the oldest output."""
        if self.scheduler.has_requests():
            self.begin_step()
            if len(self.queue) < self.in_flight and self.queue[0][0].num_scheduled_tokens:
                return
        self.end_step()

    def begin_step(self) -> Any:
        """Schedule a step and carry it out on the device."""
        self.time += self.step_ms / 1000
        scheduled = self.scheduler.schedule(**self.how)
        for new in scheduled.scheduled_new_reqs:
            self.hits.setdefault(new.req_id, new.num_computed_tokens)
        plan = getattr(scheduled, PLAN, None)
        if plan is not None:
            self.plans.append(plan)
        names, sampled, result = self.device.step(scheduled, plan, self._tokens)
        output = parts.make_output(names, sampled)
        if self._grows:
            self._usable = min(self._usable + self._grows, self.ranks.num_slots)
            growing = self._usable < self.ranks.num_slots
            result = result._replace(num_slots=self._usable, growing=growing)
        setattr(output, RESULT, result)
        self.queue.appendleft((scheduled, output))
        return scheduled

    def end_step(self) -> None:
        """Take in the oldest output."""
        scheduled, output = self.queue.pop()
        outputs = self.scheduler.update_from_output(scheduled, output)
        self.device.tell_drafts(self.scheduler, scheduled.num_scheduled_tokens)
        for one_client in outputs.values() if isinstance(outputs, dict) else [outputs]:
            for one in one_client.outputs:
                self.answers[one.request_id].extend(one.new_token_ids)
        if self.replay is not None:
            self.replay.check(self.manager if self.tier and not self.breaker.detached else None)

    def _tokens(self, name: str) -> list[int]:
        return list(self.scheduler.requests[name].all_token_ids)


class Release:
    """The vLLM whose scheduler is driven: the installed one, or one that others have chosen.

    Attributes:
        version: of the release; None: the installed one.
        find: where a module's source is.
        config: makes what the scheduler reads of an engine's configuration.
    """

    version: str | None = None
    find: Callable[[str], Path] = staticmethod(find_source)

    @classmethod
    @cache
    def decision(cls) -> Decision:
        """The patch points of this release, compared with its sources."""
        return decide(VLLM, POINTS, str(cls.number()), cls.find)

    @classmethod
    def number(cls) -> Version:
        """Which release it is."""
        return Version(cls.version or installed_version(VLLM))

    @classmethod
    def config(cls, in_flight: int, shards: int) -> Any:
        """What an engine's configuration says to its scheduler."""
        return _engine_config(in_flight, shards)


def _engine_config(in_flight: int, shards: int) -> Any:
    # Its own: what one run limits would be limited for all that come after it.
    config = copy(_checked_config(in_flight > 1))
    config.scheduler_config = copy(config.scheduler_config)
    config.parallel_config = copy(config.parallel_config)
    if shards > 1:
        config.parallel_config.decode_context_parallel_size = shards
    # The CPU platform turns it off whatever is asked for.
    config.scheduler_config.async_scheduling = in_flight > 1
    return config


@cache
def _checked_config(asynchronous: bool) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_MODEL))
        wanted = {
            "model": folder, "skip_tokenizer_init": True, "block_size": BLOCK,
            "max_model_len": 2048, "max_num_seqs": 8, "max_num_batched_tokens": parts.MAX_TOKENS,
            "async_scheduling": False,
        }  # fmt: skip
        known = inspect.signature(EngineArgs).parameters
        return EngineArgs(**{k: v for k, v in wanted.items() if k in known}).create_engine_config()
