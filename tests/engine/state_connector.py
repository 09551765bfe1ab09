"""A KV connector of one process for models some of whose layers keep a state.

It keeps a prompt's full blocks of attention, and the states at those ends of blocks at which a step
has ended; what it brings is a prefix of which it has all of that.
"""

from __future__ import annotations

from typing import Any

from flaky_connector import FlakyConnector, _Load, _Metadata, counts
from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA

__all__ = ["StateConnector", "counts"]
_kept: dict[tuple[int, int], dict[str, list[Any]]] = {}  # by prefix and group: of each layer


class StateConnector(FlakyConnector, SupportsHMA):
    """Both roles; none of its loads fails. Pairs are of a prefix with its group, and a block."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        self._layers = [list(group.layer_names) for group in groups]
        self._states = ["Mamba" in type(group.kv_cache_spec).__name__ for group in groups]
        self._group_tables: dict[str, list[list[int]]] = {}

    # In the worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._kv = {n: t if isinstance(t, (list, tuple)) else [t] for n, t in kv_caches.items()}

    def _bring(self, load: _Load) -> None:
        for (prefix, group), block in load.blocks:
            for name, parts in _kept[prefix, group].items():
                for kept, part in zip(parts, self._kv[name]):
                    part[block].copy_(kept)

    def wait_for_save(self) -> None:
        for (prefix, group), block in self._get_connector_metadata().stores:
            if (prefix, group) not in _kept:
                _kept[prefix, group] = {
                    name: [part[block].clone() for part in self._kv[name]]
                    for name in self._layers[group]
                }

    # In the scheduler

    def _known(self, request: Any) -> list[int]:
        prefixes, most = self._prefixes(request.prompt_token_ids), 0
        for at, prefix in enumerate(prefixes):
            has = [(prefix, group) in _kept for group in range(len(self._states))]
            if not all(one for one, state in zip(has, self._states) if not state):
                break
            most = at + 1 if all(has) else most
        return prefixes[:most]

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        prefixes = self._known(request)
        first = len(prefixes) - num_external_tokens // self._size
        pairs: list[Any] = []
        for group, table in enumerate(blocks.get_block_ids()):
            begin = len(prefixes) - 1 if self._states[group] else first
            found = list(zip(prefixes, table))[begin:]
            assert all(block for _, block in found)
            pairs += [((prefix, group), block) for prefix, block in found]
        counts["loads"] += 1
        self._new.append(_Load(request.request_id, pairs, False))

    def build_connector_meta(self, scheduler_output: Any) -> _Metadata:
        made, self._new = _Metadata(loads=self._new), []
        for request_id, done in self._scheduled(scheduler_output):
            end = done + scheduler_output.num_scheduled_tokens[request_id]
            prefixes = self._prefixes(self._tokens[request_id])
            for group, table in enumerate(self._group_tables[request_id]):
                begin = done // self._size
                if self._states[group]:
                    begin = end // self._size - (end % self._size == 0)
                found = list(zip(prefixes, table))[begin : end // self._size]
                made.stores += [((prefix, group), block) for prefix, block in found]
        return made

    def _scheduled(self, output: Any) -> list[tuple[str, int]]:
        found = []
        for new in output.scheduled_new_reqs:
            self._tokens[new.req_id] = new.prompt_token_ids
            self._group_tables[new.req_id] = [list(table) for table in new.block_ids]
            found.append((new.req_id, new.num_computed_tokens))
        cached = output.scheduled_cached_reqs
        for request_id, blocks, done in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens
        ):
            if request_id in cached.resumed_req_ids:
                self._group_tables[request_id] = [[] for _ in self._states]
            for table, more in zip(self._group_tables[request_id], blocks or ()):
                table += more
            found.append((request_id, done))
        return found

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None
