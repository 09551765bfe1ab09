"""`Mini` with a KV connector that is there before the tier, as in an engine.

What it has, and when its loads come, is a seed's, and alike in every engine of that seed. It may be
vLLM's own `MultiConnector` over two of them.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from integration.engine.adapters.test_vllm_stats import Figures
from integration.engine.connectors import Connector, _ManyGroups
from integration.engine.mini import BLOCK, Mini
from scheduler_half.device import _GROUP, value_after
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.outputs import KVConnectorOutput

_Load = tuple[list[int], list[list[int]], int, int]  # tokens, tables, and from where to where


class Has(Connector, _ManyGroups):  # type: ignore[misc, valid-type]
    """Has beginnings of prompts; each request is answered by its number alone.

    Args:
        mini: whose scheduler asks it.
        seed: of what it does.
        beside: it loads beside the step; then also parts of blocks, and prompts as a whole, as from
            an engine that has computed the prompt.
    """

    def __init__(self, mini: Connected, seed: int, beside: bool) -> None:
        super().__init__(mini, beside)
        self._seed, self._asked = seed, Counter[str]()
        self.loads: dict[str, _Load] = {}
        self.brought = self.sent = self.waited = self.lost = 0
        self.failed = set[str]()  # requests of which nothing came, once each

    def of(self, name: str, what: str) -> random.Random:
        """What this connector does with a request."""
        return random.Random(f"{self._seed} {self._beside} {name} {what}")

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        name = request.request_id
        if self._asked[name] < self.of(name, "unknown").choice([0, 0, 0, 1, 3]):
            self._asked[name] += 1
            self.waited += 1
            return None, False
        found = self._end(request.prompt_token_ids) - num_computed_tokens
        if name in self.failed:
            return 0, False
        return (found, self._beside) if found > 0 else (0, False)

    def _end(self, tokens: list[int]) -> int:
        end = max((len(one) for one in self.known if tokens[: len(one)] == one), default=0)
        if not self._beside:
            return min(end, len(tokens) - 1) // BLOCK * BLOCK
        # Behind a whole prompt vLLM computes its last token again, before which its window begins
        # one token earlier than where it has freed what came before.
        return end if self._mini.device._windows == (None,) else min(end, len(tokens) - 1)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            tokens = list(request.prompt_token_ids)
            end, tables = self._end(tokens), [list(one) for one in blocks.get_block_ids()]
            self.loads[request.request_id] = tokens, tables, end - num_external_tokens, end
            self.brought += num_external_tokens

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def bring(self) -> set[str]:
        """Before a forward pass: requests whose blocks were filled beside the step."""
        arrived = set[str]()
        for name in list(self.loads):
            if not self._beside or self._mini._rng_of(name).random() < 0.4:
                load, fails = self.loads.pop(name), self._fails(name)
                if fails:
                    self.failed.add(name)
                    self.lost += load[3] - load[2]
                    self._mini.failed.add(name)
                else:
                    self._fill(*load)
                arrived |= {name} if self._beside else set()
        return arrived

    def _fails(self, name: str) -> bool:
        """Whether nothing of a load beside the step comes; it is not tried again."""
        fails = self._beside and name not in self.failed
        return fails and self.of(name, "fails").random() < 0.2

    def _fill(self, tokens: list[int], tables: list[list[int]], start: int, end: int) -> None:
        value, kv = 0, self._mini.device.kv
        for at, token in enumerate(tokens[:end]):
            value = value_after(value, token)
            for group, table in enumerate(tables):
                if at >= start and table[at // BLOCK]:
                    kv[table[at // BLOCK]][at % BLOCK] = value + group * _GROUP

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        name, done = request.request_id, request.status.name == "FINISHED_LENGTH_CAPPED"
        sends = done and self.of(name, "sends").random() < 0.3
        self.sent += sends
        self._mini.sending += [name] * sends
        return sends, None

    request_finished_all_groups = request_finished


class Connected(Mini):
    """An engine in small, asked for one request after another.

    Args:
        seed: of the connectors.
        knows: whether the connector has anything; None: there is no connector.
        about: as `Mini` takes it.

    Attributes:
        computed: tokens scheduled for each request.
        failed: requests for which nothing has come, until that is told.
        sending: requests that have ended and whose blocks are kept, once for each connector.
    """

    def __init__(self, seed: int, knows: bool | None, **about: Any) -> None:
        self._seed, self._knows = seed, knows
        self.connectors, self.sending = list[Has](), list[str]()
        self.computed, self._rngs = Counter[str](), dict[str, random.Random]()
        self.preempted, self.failed = 0, set[str]()
        super().__init__(**about)
        self.scheduler.recompute_kv_load_failures = True
        self._prepare, self.device._prepare = self.device._prepare, self._bring
        self._arrived = set[str]()
        self.figures = Figures(self)

    def _make_scheduler(self, *args: Any, **more: Any) -> None:
        super()._make_scheduler(*args, **more)
        if self._knows is None:
            return
        rng = random.Random(f"connector {self._seed}")
        kinds = rng.choice([[False], [True], [False, True], [True, False], [True, True]])
        self.connectors = [Has(self, self._seed + n, kind) for n, kind in enumerate(kinds)]
        if len(kinds) > 1:
            self.scheduler.connector = _several(self.connectors)
        if self.scheduler.log_stats:
            self.scheduler.connector_prefix_cache_stats = PrefixCacheStats()

    def show(self, prompt: list[int], rng: random.Random) -> None:
        """A prompt, of which a connector may have the beginning from now on."""
        ends = [rng.choice([0, 0, rng.randrange(len(prompt) + 1), len(prompt)]) for _ in range(2)]
        for connector, end in zip(self.connectors, ends):
            if self._knows and end:
                connector.known.append(prompt[:end])

    def _rng_of(self, name: str) -> random.Random:
        return self._rngs.setdefault(name, random.Random(f"{self._seed} {name}"))

    def _bring(self, scheduled: Any) -> None:
        self._prepare(scheduled)
        for connector in self.connectors:
            self._arrived |= connector.bring()

    def begin_step(self) -> Any:
        """A step, with what the connectors say with its output."""
        scheduled = super().begin_step()
        self.computed.update(scheduled.num_scheduled_tokens)
        self.preempted += len(getattr(scheduled, "preempted_req_ids", None) or ())
        sent = {name for name in self.sending if self._rng_of(name).random() < 0.4}
        for name in sent:
            self.sending.remove(name)
        if sent or self._arrived:
            done = {"finished_sending": self._all_sent(sent), "finished_recving": self._arrived}
            said = KVConnectorOutput(**done, failed_recving=self.failed)
            self.queue[0][1].kv_connector_output = said
            self._arrived, self.failed = set(), set()
        return scheduled

    def _all_sent(self, sent: set[str]) -> set[str]:
        """Those that no connector sends any more, as a worker's `MultiConnector` tells."""
        return {name for name in sent if name not in self.sending}

    @property
    def brought(self) -> int:
        """Tokens that the connectors have brought, or have said that they would."""
        return sum(connector.brought for connector in self.connectors)

    @property
    def sent(self) -> int:
        """Requests whose blocks they have kept."""
        return sum(connector.sent for connector in self.connectors)

    @property
    def waited(self) -> int:
        """Times that they could not say yet."""
        return sum(connector.waited for connector in self.connectors)

    @property
    def num_failed(self) -> int:
        """Requests for which nothing has come that should."""
        return sum(len(connector.failed) for connector in self.connectors)

    def check_figures(self, which: str) -> None:
        """vLLM's own figures have each token of a prompt once."""
        told, prompts = self.figures, sum(map(len, self.prompts.values()))
        assert told.local_prompt + told.external_prompt + told.computed == prompts, which
        again = [name for connector in self.connectors for name in connector.failed]
        assert told.queried == prompts + sum(len(self.prompts[name]) for name in again), which
        lengths = {name: len(prompt) for name, prompt in self.prompts.items()}
        # Of which the last token alone is computed: the tier's last block is no hit, while of a
        # prompt that a connector has brought as a whole the last token is one.
        full = sum(hit == lengths[name] - 1 for name, hit in self.hits.items())
        found = told.local_prompt + told.external_prompt - sum(self.hits.values())
        assert -(BLOCK - 1) * full <= found <= full, which
        if self._knows is not None:
            # Those that were to come, and those of the prompts that are computed with them.
            lost = sum(connector.lost for connector in self.connectors)
            assert told.external == told.external_prompt + lost == self.brought, which


def _several(connectors: list[Has]) -> MultiConnector:
    """vLLM's own, made without a configuration."""
    made = MultiConnector.__new__(MultiConnector)
    made._connectors, made._all_support_hma = list(connectors), True
    made._requests_to_connector, made._extra_async_saves = {}, {}
    return made
