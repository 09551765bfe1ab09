"""What a request takes of each KV cache group of vLLM's: blocks of tokens, states, rings."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from kvoffload_patch.integration.engine.adapters.prefix_groups import split


class CacheGroups:
    """The KV cache groups of one scheduler.

    From 0.29 on some take no part in the prefix cache: a ring, of which a request has one block all
    its life, and from 0.31 on windows that vLLM fills again behind a hit, by computing its last
    tokens once more. Nothing of these is stored or loaded; they only take room.

    Args:
        scheduler: a `vllm.v1.core.sched.scheduler.Scheduler`, constructed.
        managers: vLLM's own, one for each group.

    Attributes:
        block_sizes: tokens of a block, by group.
        cached_sizes: of the groups that take part in the prefix cache.
        states: groups, by index, whose blocks hold a state after their last token, and how many of
            these a request has at once, at most, whatever a step computes.
        replay_tokens: of the end of a hit, that are computed again. A hit of no more is none.
        parts: whether a hit may end within a block (a --prefix-match-unit smaller than a block).
        decode_tokens: that a decode step gives to a request, at most.
        decode_blocks: that a running request takes for a decode step, at most.
    """

    def __init__(self, scheduler: Any, managers: Sequence[Any]) -> None:
        self._scheduler = scheduler
        specs = [manager.kv_cache_spec for manager in managers]
        self.block_sizes = tuple(int(manager.block_size) for manager in managers)
        self.cached_sizes = tuple(
            size for size, spec in zip(self.block_sizes, specs) if is_cached(spec)
        )
        self.states = {i: states_held(spec) for i, spec in enumerate(specs) if keeps_state(spec)}
        self.replay_tokens = int(getattr(scheduler, "prefix_replay_tokens", 0))
        self.parts = hits_parts(scheduler)
        self._most = tuple(map(self._blocks_held, managers))
        # From 0.19 on a request is admitted only where there is room for all of its prompt.
        self._reserves_all = bool(getattr(scheduler, "scheduler_reserve_full_isl", False))
        self._caps = tuple(map(_admission_cap, managers))
        self._windows = tuple(map(_window_of, managers))
        self._draft_blocks = draft_states_held(specs)
        # Of groups that take blocks as a request grows; by index, which `states` has too.
        self._growing = {
            i: size for i, size in enumerate(self.block_sizes) if not is_ring(specs[i])
        }
        self.decode_tokens = 1 + int(getattr(scheduler, "num_spec_tokens", 0))
        ahead = self.decode_tokens + int(scheduler.num_lookahead_tokens)
        self.decode_blocks = sum(-(-ahead // size) for size in self._growing.values())
        # A state that ends a hit within a block goes to a block of its own before it is advanced.
        self._moved = len(self.states) * self.parts
        self.decode_blocks += self._moved

    def _blocks_held(self, manager: Any) -> int | None:
        """Blocks of this group that a request keeps, at most; None where it keeps all."""
        spec, size = manager.kv_cache_spec, int(manager.block_size)
        if keeps_state(spec) and not at_every_block(spec):
            return states_held(spec)
        if is_ring(spec):
            return 1
        window, chunk = _window_of(manager)
        if not (window or chunk):
            return None
        ahead = self._scheduler.max_num_scheduled_tokens + self._scheduler.num_lookahead_tokens
        # What a window reaches of the first block may be its last token.
        seen = window - 1 + size if window else chunk
        return -(-(seen + int(ahead)) // size)

    def blocks_for(self, tokens: int, hit_tokens: int = 0) -> int:
        """Blocks, over all groups, that hold this many tokens of one request, and its drafts.

        Args:
            hit_tokens: of these, the first so many need not be computed: a request that begins
                behind them holds none of what a window does not reach from there.
        """
        total = self._draft_blocks
        if self.parts and hit_tokens:
            total += len(self.block_sizes)  # a copy of the block in which the hit ends
        groups = zip(self.block_sizes, self._most, self._caps, self._windows)
        for size, most, cap, (window, chunk) in groups:
            unseen = max(0, hit_tokens - window + 1) if window else 0
            unseen = hit_tokens // chunk * chunk if chunk else unseen
            whole, unseen = -(-tokens // size), unseen // size
            held = whole - unseen
            if most is not None:
                counted = min(whole, cap) - unseen if self._reserves_all else 0
                held = max(min(held, most), counted)
            total += held
        return total

    def new_blocks(self, request: Any, tokens: int) -> int:
        """Blocks, over all groups, that a running request needs to compute so many tokens more."""
        done = request.num_computed_tokens
        end = done + tokens + self._scheduler.num_lookahead_tokens
        if self.replay_tokens and request.replay_start:
            # It has the blocks of its hit, whose end it computes again.
            done = max(done, request.replay_start + self.replay_tokens)
            end = max(end, done)
        total = self._moved
        for group, size in self._growing.items():
            blocks = -(-end // size) - -(-done // size)
            total += min(blocks, self.states.get(group, blocks))
        return total

    def keys_in(self, blocks: Sequence[Any]) -> list[Hashable]:
        """The key of each of these GPU blocks; None if it is not in the prefix cache as a whole.

        With hits that end within a block, the block of a state is written to after it has got a
        key: the next step of its request moves that to another block. Ranks that have a part of
        each block (decode context parallelism) have states as a whole, so their blocks are shorter.
        """
        keys: list[Hashable] = [block._block_hash for block in blocks]  # no call for each
        if self.parts:
            sizes = self.block_sizes
            for at, block in enumerate(blocks):
                key = keys[at]
                if key is not None and block.block_hash_num_tokens % sizes[split(key)[1]]:
                    keys[at] = None
        return keys

    def computed_from(self, hit_tokens: int) -> int:
        """The token from which on a request is computed that hits so many."""
        return max(0, hit_tokens - self.replay_tokens)


def _admission_cap(manager: Any) -> int:
    """Blocks that vLLM counts of all of a prompt in this group, at most.

    Of a window, those of a step, and with asynchronous scheduling from 0.26 on of all steps under
    way. No fewer than there are in 0.19, which counts one for each of the prompt's, as it does of
    states at every block in any release. 0 of other states and rings, which vLLM counts as those
    that a request keeps.
    """
    spec = manager.kv_cache_spec
    if is_ring(spec) or (keeps_state(spec) and not at_every_block(spec)):
        return 0
    names = "max_admission_blocks_per_request", "_max_admission_blocks_per_request"  # up to 0.30
    caps = [getattr(manager, name, None) for name in names]
    return next((int(cap) for cap in caps if cap is not None), sys.maxsize)


def _window_of(manager: Any) -> tuple[int, int]:
    """Tokens of a group's sliding window, or of its chunks; 0 of what it has not.

    Windows are one thing and blocks another where vLLM has one group for all layers. A window has
    its own token as well as those before that it sees.
    """
    if at_every_block(manager.kv_cache_spec):
        return 2, 0
    if type(manager).__name__ == "FullAttentionManager":
        return 0, 0
    first = members(manager.kv_cache_spec)[0]
    window, chunk = (getattr(first, n, 0) for n in ("sliding_window", "attention_chunk_size"))
    return int(window or 0), int(chunk or 0)


def hits_parts(scheduler: Any) -> bool:
    """Whether a hit of vLLM's prefix cache may end within a block."""
    coordinator = scheduler.kv_cache_manager.coordinator
    return bool(getattr(coordinator, "enable_partial_hash_hits", False))


def is_cached(spec: Any) -> bool:
    """Whether a group's blocks enter the prefix cache; a spec says it from 0.29 on."""
    return bool(getattr(spec, "prefix_cacheable", True))


def is_ring(spec: Any) -> bool:
    """Whether a request has one block of a group, whose tokens take the place of earlier ones."""
    return type(members(spec)[0]).__name__ == "CircularBufferSpec"


def keeps_state(spec: Any) -> bool:
    """Whether a group's blocks hold the state of layers, and not the KV of tokens."""
    return any(type(one).__name__ == "MambaSpec" for one in members(spec))


def at_every_block(spec: Any) -> bool:
    """Whether a step leaves a state at the end of each block (mode all, up to 0.31).

    Such blocks are given out and up as those of a window: the next token sees the one before alone.
    """
    return any(getattr(one, "mamba_cache_mode", None) == "all" for one in members(spec))


def states_held(spec: Any) -> int:
    """States of such a group that a request has at once, at most.

    That of the token a step begins behind, that of its last one, and from 0.29 on those that a step
    may leave behind between the two. In mode all one of each block that a step computes.
    """
    if at_every_block(spec):
        return sys.maxsize
    more = (getattr(one, "num_prefill_checkpoint_blocks", 0) for one in members(spec))
    return 2 + max(map(int, more))


def draft_states_held(specs: Iterable[Any]) -> int:
    """States of drafted tokens, over all groups; a request has a block for each once admitted."""
    ahead = ([getattr(m, "num_speculative_blocks", 0) for m in members(spec)] for spec in specs)
    return sum(max(map(int, blocks)) for blocks in ahead)


def leaves_last_out(coordinator: Any) -> bool:
    """Whether vLLM leaves the last block that it finds of some group out of a hit.

    A drafting model may have read a token behind it. From 0.23 on managers say it; before, the
    coordinator says it, up to 0.19 of all at once.

    Args:
        coordinator: vLLM's, of all groups.
    """
    managers = coordinator.single_type_managers
    if any(hasattr(manager, "use_eagle") for manager in managers):
        return any(manager.use_eagle for manager in managers)
    some = getattr(coordinator, "eagle_group_ids", ())
    return bool(getattr(coordinator, "use_eagle", False) or some)


def members(spec: Any) -> list[Any]:
    """A spec for each kind of layer in a group."""
    of_layers = getattr(spec, "kv_cache_specs", None)
    return [spec] if of_layers is None else list(of_layers.values())


def kinds(groups: Iterable[Any]) -> set[str]:
    """Names of the classes of the specs that these groups have."""
    return {type(member).__name__ for group in groups for member in members(group.kv_cache_spec)}
