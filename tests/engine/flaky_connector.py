"""A KV connector of one process that keeps full blocks of prompts, and some of whose loads fail.

What a load that fails should have brought is garbage in its second half, and its blocks are
reported as invalid. Extra configuration: ``use_async``: loads beside the step; ``at_once``: these
are made by the host before the forward pass of the step that begins them; ``fail_every``: every so
manieth load fails, and a request does not try twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

_GARBAGE = 3.25
_stored: dict[int, dict[str, Any]] = {}  # by prefix: a block's tensor of each layer
counts = {"loads": 0, "failed": 0}


@dataclass
class _Load:
    request_id: str
    blocks: list[tuple[int, int]]  # prefix, GPU block
    fails: bool
    steps: int = 0  # since it began


@dataclass
class _Metadata(KVConnectorMetadata):
    loads: list[_Load] = field(default_factory=list)
    stores: list[tuple[int, int]] = field(default_factory=list)


class FlakyConnector(KVConnectorBase_V1):
    """Both roles; an instance has the one or the other."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        asked = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._size = vllm_config.cache_config.block_size
        self._beside = bool(asked.get("use_async"))
        self._at_once = bool(asked.get("at_once"))
        self._fail_every = int(asked.get("fail_every", 0))
        self._tried: set[str] = set()
        self._new: list[_Load] = []
        self._tokens: dict[str, list[int]] = {}
        self._tables: dict[str, list[int]] = {}
        self._invalid: set[int] = set()
        self._under_way: list[_Load] = []
        self._received: set[str] = set()

    # In the worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        # Up to 0.22 keys and values are the first dimension, and blocks the second.
        self._kv = {name: t.transpose(0, 1) if len(t) == 2 else t for name, t in kv_caches.items()}

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        self._invalid = set()
        new = self._get_connector_metadata().loads
        for load in self._under_way:
            load.steps += 1
        due = [load for load in self._under_way if load.steps >= 2] if self._beside else new
        self._under_way = [load for load in self._under_way if load.steps < 2]
        if self._beside and self._at_once:
            due, new = due + new, []
        for load in due:
            self._bring(load)
        if self._beside:
            self._received.update(load.request_id for load in due)
            self._under_way += new

    def _bring(self, load: _Load) -> None:
        counts["failed"] += load.fails
        for at, (prefix, block) in enumerate(load.blocks):
            wrong = load.fails and at >= len(load.blocks) // 2
            for name, tensor in self._kv.items():
                if wrong:
                    tensor[block].fill_(_GARBAGE)
                else:
                    tensor[block].copy_(_stored[prefix][name])
            if wrong:
                self._invalid.add(block)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *_: Any, **__: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        for prefix, block in self._get_connector_metadata().stores:
            if prefix not in _stored:
                _stored[prefix] = {name: t[block].clone() for name, t in self._kv.items()}

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        received, self._received = self._received, set()
        return None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._invalid

    # In the scheduler

    def _prefixes(self, tokens: list[int]) -> list[int]:
        """A prompt's full blocks but for what its last token is in."""
        size = self._size
        return [
            hash(tuple(tokens[: end * size])) for end in range(1, (len(tokens) - 1) // size + 1)
        ]

    def _known(self, request: Any) -> list[int]:
        prefixes = self._prefixes(request.prompt_token_ids)
        missing = (at for at, prefix in enumerate(prefixes) if prefix not in _stored)
        return prefixes[: next(missing, len(prefixes))]

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        found = len(self._known(request)) * self._size - num_computed_tokens
        if found <= 0 or request.request_id in self._tried:
            return 0, False
        self._tried.add(request.request_id)
        return found, self._beside

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        prefixes = self._known(request)
        first = len(prefixes) - num_external_tokens // self._size
        pairs = list(zip(prefixes, blocks.get_block_ids()[0]))[first:]
        counts["loads"] += 1
        fails = bool(self._fail_every) and counts["loads"] % self._fail_every == 0
        self._new.append(_Load(request.request_id, pairs, fails))

    def build_connector_meta(self, scheduler_output: Any) -> _Metadata:
        made, self._new = _Metadata(loads=self._new), []
        failing = {load.request_id for load in made.loads if load.fails}
        for request_id, done in self._scheduled(scheduler_output):
            end = done + scheduler_output.num_scheduled_tokens[request_id]
            if request_id not in failing:
                prefixes = self._prefixes(self._tokens[request_id])
                pairs = list(zip(prefixes, self._tables[request_id]))
                made.stores += pairs[done // self._size : end // self._size]
        return made

    def _scheduled(self, output: Any) -> list[tuple[str, int]]:
        """Requests of a step and their computed tokens; takes their blocks in."""
        found = []
        for new in output.scheduled_new_reqs:
            self._tokens[new.req_id] = new.prompt_token_ids
            self._tables[new.req_id] = list(new.block_ids[0])
            found.append((new.req_id, new.num_computed_tokens))
        cached = output.scheduled_cached_reqs
        for request_id, blocks, done in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens
        ):
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = []
            self._tables[request_id] += blocks[0] if blocks else []
            found.append((request_id, done))
        return found

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return False, None
