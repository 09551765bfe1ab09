"""Whether each request of a random run hits what is there when it is looked up, or why not."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from kvoffload_patch.integration.engine.requests.lookup import TierHit


class Everything:
    """A block pool for vLLM's search: what the GPU has, what comes to it, and what the tier has.

    Args:
        mini: the engine.
        alone: the GPU, without the tier and what comes from it.

    Attributes:
        only_there: blocks that were found free on the GPU and that the tier lacks, by key.
    """

    def __init__(self, mini: Any, alone: bool) -> None:
        self._real, self._view = mini.pool, mini.view
        self._untrusted = mini.tier._invalid.untrusted
        self._ticket_of = {} if alone else mini.tier._loads.ticket_of
        self._readable = _none if alone else mini.manager.lookup
        self._failed = mini.manager.load_failed
        self.only_there: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def get_cached_block(self, block_hash: Any, group_ids: list[int]) -> list[Any] | None:
        """As vLLM's."""
        found = list[Any]()
        for group in group_ids:
            on_gpu = self._real.get_cached_block(block_hash, [group]) or ()
            key = self._view.key(block_hash, group)
            if on_gpu and not self._is_wrong(*on_gpu):
                found += on_gpu
                if not on_gpu[0].ref_cnt and not self._readable(key):
                    self.only_there[key] = on_gpu[0]
                continue
            if not self._arrives(key) and not self._readable(key):
                return None
            found.append(TierHit(key))
        return found

    def _arrives(self, key: Any) -> bool:
        ticket = self._ticket_of.get(key)
        return ticket is not None and not self._failed(ticket)

    def _is_wrong(self, block: Any) -> bool:
        """Whether it leaves the prefix cache in this step: a connector has failed to fill it."""
        return not block.ref_cnt and block.block_id in self._untrusted


def _none(_: object) -> bool:
    return False


class _There(NamedTuple):
    """What a request could hit at the begin of a step, of so many; ``alone``: on the GPU.

    ``at_risk``: keys of what of it only free blocks of the GPU had, and whether the tier has had
    its turn to store it, or was not to.
    """

    tokens: int
    alone: bool
    step: int
    at_risk: dict[Any, bool]


class Finds:
    """Watches a `Mini`: a request hits all that is there in the step that looks it up for good.

    That is the last one before which it waits for nothing but its turn: it is admitted in this
    step, or is parked until a load is done.

    Args:
        mini: the engine.
        watches: whether it does, which is not cheap: all that waits is looked up in each step.

    Attributes:
        seen: requests that were admitted, tokens that were there for them, and, of those that hit
            less, why.
        found: the same of those that hit less for no reason that is known.
    """

    def __init__(self, mini: Any, watches: bool) -> None:
        self._mini = mini
        self.seen, self.found = Counter[str](), Counter[str]()
        if not watches:
            return
        self._step, mini.begin_step = mini.begin_step, self._begin_step
        tier = mini.tier
        self._before, tier.before_schedule = tier.before_schedule, self._look
        admission, loads = tier._admission, tier._loads
        self._look_up, admission._look_up = admission._look_up, self._looked_up
        self._not_hit, loads._not_hit = loads._not_hit, self._failed
        self._plan, mini.manager._plan_store = mini.manager._plan_store, self._stored
        self._there = dict[str, _There]()
        self._may_join = dict[str, bool]()  # looked up in this step, and whether it fits
        self._let_in = set[str]()  # those that vLLM may admit in this step
        self._begun = set[Any]()  # keys of all stores, whatever became of them
        self._idle = False  # a load of this step may have begun on an idle engine
        self._number = 0

    def _stored(self, *args: Any) -> Any:
        if stores := self._plan(*args):
            self._begun.update(self._mini.manager._stores.under_way[-1][1])
        return stores

    def _looked_up(self, request: Any, *more: Any) -> bool:
        self._taken_before(request)
        running, loads = self._mini.scheduler.running, self._mini.tier._loads
        self._idle |= not (running or loads.under_way)
        budget, *_ = more
        before = budget.admissible
        fits = bool(self._look_up(request, *more))
        self._may_join[request.request_id] = fits
        if budget.admissible > before:  # also one that does not fit by the tier's count
            self._let_in.add(request.request_id)
        return fits

    def _failed(self, name: str) -> None:
        self._not_hit(name)
        if self._there.pop(name, None):
            self.seen["load failed"] += 1

    def _look(self) -> None:
        """Before the tier does anything in a step, commands aside."""
        view, tier = self._mini.view, self._mini.tier
        for request in list(view.waiting()):
            if view.needs_lookup(request):
                alone = tier.paused or view.is_stale(request)
                begins, only_there = self._search(request, alone)
                at_risk = {key: self._had_its_turn(key, at) for key, at in only_there.items()}
                self._there[request.request_id] = _There(begins, alone, self._number, at_risk)
        self._before()

    def _search(self, request: Any, alone: bool) -> tuple[int, dict[Any, Any]]:
        """Tokens that a request could hit, and what of them only free blocks of the GPU have."""
        everything, prefix = Everything(self._mini, alone), self._mini.view.prefix
        _, tokens = prefix.longest_hit(request, everything)
        # Of a hit vLLM may compute the end again.
        return self._mini.view.groups.computed_from(tokens), everything.only_there

    def _had_its_turn(self, key: Any, block: Any) -> bool:
        """Whether the tier has begun to store a block before, or was not to."""
        tier, stats = self._mini.tier, self._mini.manager.stats
        left_out = stats.paused + stats.opted_out + stats.decode + stats.few_uses + stats.dropped
        return key in self._begun or left_out > 0 or block.block_id in tier._front._refused

    def _taken_before(self, request: Any) -> None:
        """A request is about to be looked up: what loads before it were given is not there.

        Of what only the GPU has a load may take blocks that one behind it would hit
        (docs/admission.md): where the store is under way or has failed, or the tier has evicted it.
        Not what the tier could have stored first and has not, but that an idle engine waits for no
        store.
        """
        there = self._there.get(request.request_id)
        if there is None or there.alone or there.step != self._number:
            return
        on_gpu, readable = self._mini.view.gpu_lookup(), self._mini.manager.lookup
        lost = [key for key in there.at_risk if on_gpu(key) is None and not readable(key)]
        if lost and (self._idle or all(map(there.at_risk.get, lost))):
            tokens, _ = self._search(request, alone=False)
            if tokens < there.tokens:
                self.seen["less: loads before it took it"] += 1
                self._there[request.request_id] = there._replace(tokens=tokens)

    def _begin_step(self) -> Any:
        stats = self._mini.manager.stats
        self._number += 1
        self._may_join.clear()
        self._let_in.clear()
        self._idle = False
        emptied = stats.removed["weights"]
        scheduled = self._step()
        self._leave_to_connector()
        for name, found in admitted(scheduled):
            if (there := self._there.pop(name, None)) is not None:
                self.seen.update({"admitted": 1, "there": there.tokens})
                if found < there.tokens:
                    self._less(name, there, found, stats.removed["weights"] > emptied)
        return scheduled

    def _leave_to_connector(self) -> None:
        """Forget what a connector loads for from this step on, without a look of the tier."""
        requests = self._mini.scheduler.requests
        for name in self._there.keys() - self._may_join.keys():
            now = name in requests and self._there[name].step == self._number
            if now and requests[name].status.name == "WAITING_FOR_REMOTE_KVS":
                del self._there[name]
                self.seen["a connector's"] += 1

    def _less(self, name: str, there: _There, found: int, other_weights: bool) -> None:
        if there.alone:
            self.seen["less: paused"] += 1  # nothing is held on the GPU for it
        elif other_weights:
            self.seen["less: other weights"] += 1
        elif name not in self._may_join and there.step == self._number and self._passed_over():
            self.seen["less: joins for another"] += 1
        elif not self._may_join.get(name, True):
            self.seen["less: no room to keep it"] += 1
        else:
            parked = "parked" if there.step < self._number else "at once"
            self.found[f"{name}, {parked}, found {found} of {there.tokens}"] += 1

    def _passed_over(self) -> bool:
        """Whether vLLM has passed over a request that it might admit.

        One that a connector has begun to load for leaves its place as well, if it fitted or not.
        """
        view = self._mini.view
        waiting = {one.request_id: one.status.name for one in view.waiting()}
        loads = {name for name, status in waiting.items() if status == "WAITING_FOR_REMOTE_KVS"}
        left = self._let_in | (loads & self._may_join.keys() - view._parked.keys())
        return not left.isdisjoint(waiting)


def admitted(scheduled: Any) -> list[tuple[str, int]]:
    """Requests that begin in a step, or begin again, and what is computed of each."""
    new = [(one.req_id, one.num_computed_tokens) for one in scheduled.scheduled_new_reqs]
    cached = scheduled.scheduled_cached_reqs
    if isinstance(cached, list):  # up to 0.9
        again = [one for one in cached if one.resumed_from_preemption]
        return new + [(one.req_id, one.num_computed_tokens) for one in again]
    names = getattr(cached, "resumed_req_ids", None)
    if names is None:  # up to 0.11.0
        names = [n for n, again in zip(cached.req_ids, cached.resumed_from_preemption) if again]
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens))
    return new + [(name, computed[name]) for name in names]
