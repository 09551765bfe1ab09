"""What is stored when, and what counts as a use: the part of a tier that a model of it asks.

Rules use the tier's own manager, which holds the slots and makes the plans; its eviction policy is
theirs. These are the rules of this package; those of vLLM's connectors stand in `connectors`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.policies.lru import LRUPolicy
from kvoffload_patch.tier.policy import EvictionPolicy
from scripts.simulate.gpu import GpuPool
from scripts.simulate.trace import Request

Keys = Sequence[Hashable]
NewPolicy = Callable[[Sequence[Hashable]], EvictionPolicy]


@dataclass(eq=False)
class Run:
    """A request that has its blocks.

    Attributes:
        number: of the request in the trace.
        request: what is asked.
        blocks: its GPU blocks, head first.
        hit: blocks of its prompt that were found, on the GPU or in the tier.
        on_gpu: those of them that were found on the GPU.
        ticket: of the load that it waits for, its own or another's; 0 if for none.
        tokens: prompt tokens computed or found.
        keyed: its blocks that are full, found ones included.
        over: it has given its blocks back.
        reused, stored: what rules note of its keys, head first.
    """

    number: int
    request: Request
    blocks: list[int]
    hit: int
    on_gpu: int
    ticket: int
    tokens: int
    keyed: int
    over: bool = False
    reused: list[Hashable] = field(default_factory=list)
    stored: list[Hashable] = field(default_factory=list)


class Rules:
    """This package's rules, with an eviction and a store policy.

    What is hit on the GPU is a use of its copy. With `eager` every block is stored in the step that
    computes it, answers included, and what is hit is stored again where the tier has lost it. With
    the others the tier is told of the blocks that the GPU hands out next.

    Args:
        slots: of the tier.
        policy: eviction policy.
        store: store policy.
        ahead: how many of the GPU's free blocks the tier is told of.
        decode: whether blocks that answers fill are stored.
        min_uses: how often a block must have been used to be stored.
        growing: more slots are to come.
        gpu_blocks: what `auto` weighs; 0: it does not.
    """

    def __init__(
        self,
        slots: int,
        policy: NewPolicy = LRUPolicy,
        store: str = "eager",
        ahead: int = 0,
        decode: bool = True,
        min_uses: int = 1,
        growing: bool = False,
        gpu_blocks: int = 0,
    ) -> None:
        self.manager = OffloadManager(slots, policy, growing, store, min_uses, gpu_blocks)
        self._ahead, self._decode = ahead, decode

    def may_overwrite(self, gpu: GpuPool, count: int) -> bool:
        """Whether so many free blocks can be handed out, without loss of what only they hold."""
        return not self.manager.about_to_lose(*gpu.next_out(count))

    def admitted(self, run: Run) -> None:
        """A request was given its blocks; what it loads is planned."""
        blocks = run.blocks[: run.on_gpu]
        keys = list(run.request.keys[: run.on_gpu])
        self.manager.hit_on_gpu(blocks, keys, lambda block, key: True)

    def computed(self, run: Run, keys: Keys, blocks: Sequence[int]) -> dict[Hashable, int]:
        """These blocks of a prompt are filled by this step: what to store with its plan."""
        return dict(zip(keys, blocks))

    def answered(self, run: Run, key: Hashable, block: int) -> None:
        """An answer has filled this block."""
        if self._decode and self.manager.offer({key: block}):
            self.manager.queue_store(key, block)

    def ended(self, run: Run) -> None:
        """A request has its answer, and still its blocks."""
        self.manager.request_ended(run.request.keys)

    def step(self, gpu: GpuPool, idle: Sequence[int]) -> None:
        """A plan is about to be made; since the last one these blocks came to be used by nobody."""
        if self.manager.looks_ahead:
            self.manager.about_to_lose(*gpu.next_out(self._ahead))


class IgnoresRequests(Rules):
    """Requests store nothing and use nothing; a step may store."""

    def admitted(self, run: Run) -> None:
        pass

    def computed(self, run: Run, keys: Keys, blocks: Sequence[int]) -> dict[Hashable, int]:
        return {}

    def answered(self, run: Run, key: Hashable, block: int) -> None:
        pass

    def ended(self, run: Run) -> None:
        pass


class NoTier(IgnoresRequests):
    """Plain vLLM: what leaves the GPU is gone."""

    def __init__(self) -> None:
        super().__init__(0)
