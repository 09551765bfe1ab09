"""Drafted tokens: what vLLM's scheduler asks of a configuration with them, and a drafter."""

from __future__ import annotations

import random
from typing import Any

NOTHING = -1  # in the place of a draft: a step has room for more than were drafted


class Drafter:
    """Stands for vLLM's `SpeculativeConfig`, and drafts.

    Args:
        count: tokens drafted for each step, at most.
        seed: of which drafts are right.
        reads_layers: as EAGLE and MTP, whose layers make a hit's last block one to compute again;
            n-grams have none.
        always: whether it always drafts ``count`` tokens, as asynchronous scheduling takes for
            granted.
        hash_lookahead: tokens behind a block that its key has as well, where layers read them: in
            vLLM none, one, or ``count`` of them.
    """

    num_speculative_tokens_per_batch_size = None
    max_num_new_slots_for_drafting = 0
    disable_eagle_block_drop = False

    def __init__(
        self, count: int, seed: int, reads_layers: bool, always: bool, hash_lookahead: int = 0
    ) -> None:
        self.num_speculative_tokens, self.always = count, always
        self.hash_lookahead = hash_lookahead
        self.disable_lookahead_block_hashes = not hash_lookahead
        self.method = "mtp" if reads_layers else "ngram"
        self._rng = random.Random(f"drafts {seed}")
        self.accepted = self.refused = 0

    def use_eagle(self) -> bool:
        return self.method == "mtp"

    use_eagle_block_drop = needs_eagle_block_drop = use_eagle

    def _no(self) -> bool:
        return False

    use_dspark = use_dflash = uses_draft_model = _no

    def use_multi_module_mtp(self) -> bool:
        return self.hash_lookahead > 1

    def draft(self, right: list[int]) -> list[int]:
        """Guess the next tokens, which are ``right``: the first ones of them, and then others."""
        drafted = list(right)
        drafted = drafted if self.always else drafted[: self._rng.randrange(len(right) + 1)]
        wrong_from = self._rng.randrange(len(right) + 1)
        for at in range(wrong_from, len(drafted)):
            drafted[at] = self._rng.choice([drafted[at] + 1, NOTHING if self.always else 3])
        return drafted

    def verify(self, drafted: list[int], sampled: list[int]) -> list[int]:
        """The sampled tokens that stand: up to the first that was drafted otherwise."""
        right = 0
        while right < len(drafted) and drafted[right] == sampled[right]:
            right += 1
        self.accepted += right
        self.refused += len(drafted) - right
        return sampled[: right + 1]


def tell(scheduler: Any, guesses: dict[str, list[int]]) -> None:
    """As an engine core does after a step that was not asynchronous."""
    try:
        from vllm.v1.outputs import DraftTokenIds
    except ImportError:
        return  # up to 0.10.1 they come with the output: nothing is drafted
    scheduler.update_draft_token_ids(DraftTokenIds(list(guesses), list(guesses.values())))


def scheduled_drafts(scheduled: Any, name: str, guessed: list[int]) -> list[int]:
    """What a request's step has besides tokens that are known.

    With asynchronous scheduling only their number is told, and the runner knows them.
    """
    told = list((getattr(scheduled, "scheduled_spec_decode_tokens", None) or {}).get(name, ()))
    if any(token != NOTHING for token in told):
        return told
    return (guessed + [NOTHING] * len(told))[: len(told)]
