"""The faults of `scripts/matrix mutants`: what each breaks, where, and which tests notice it.

Others are in `mutants_engine.py`, `mutants_connectors.py`, `mutants_groups.py`,
`mutants_heads.py` and `mutants_patching.py`.

Each would give a wrong token, leave something behind, hang, or refuse wrongly or not at all. Tests
are the narrowest file that is to notice it; of a file that takes long, or imports vLLM, one test.
A fault that no test notices stays in the list, and a test is written.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A fault.

    Attributes:
        name: what is broken.
        file: below the package.
        text: in that file, once.
        instead: what is there then.
        tests: files of tests below tests/, or single tests of them.
    """

    name: str
    file: str
    text: str
    instead: str
    tests: tuple[str, ...]


_WORKER = "integration/worker/"
_MANAGER = ("tier/test_manager.py",)
_RANK = ("integration/worker/test_tier.py",)

TIER = (
    Mutant(
        "a store is not waited for when its block is handed out again",
        "tier/manager.py",
        "if last > stores.waited:",
        "if False:",
        _MANAGER,
    ),
    Mutant(
        "a store counts as waited for before any forward pass is told to wait for it",
        "tier/entries.py",
        "link.waited = max(link.waited, link.wait)",
        "link.waited = link.last",
        _MANAGER,
    ),
    Mutant(
        "what waits to be stored is kept when its block is handed out",
        "tier/queues.py",
        "dropped = _drop(self, gpu_block_ids)\n        if not",
        "dropped = []\n        if not",
        _MANAGER,
    ),
    Mutant(
        "a request that has ended is told of while blocks of it wait to be stored",
        "tier/manager.py",
        "self._stores.last + bool(self._waiting)",
        "self._stores.last",
        _MANAGER,
    ),
    Mutant(
        "a block is readable before its store is done",
        "tier/state.py",
        "slot is not None and self._store_to[slot] <= self._stores.done",
        "slot is not None",
        _MANAGER,
    ),
    Mutant(
        "a prefix is found in slots that are being written",
        "tier/state.py",
        "self.lookup if self._stores.under_way else self._slot_of.get",
        "self._slot_of.get",
        _MANAGER,
    ),
    Mutant(
        "a failed store's slot is readable",
        "tier/manager.py",
        "if ticket in link.failed:",
        "if link is self._loads and ticket in link.failed:",
        ("tier/test_manager_failures.py",),
    ),
    Mutant(
        "a slot is free while a load reads it",
        "tier/manager.py",
        "if written or self._held.is_read(slot):",
        "if written:",
        _MANAGER,
    ),
    Mutant(
        "a slot is evicted while a load reads it",
        "tier/manager.py",
        "self._policy.pin(slots[::-1])",
        "pass",
        _MANAGER,
    ),
    Mutant(
        "a policy gives up what it was told is pinned",
        "tier/prefixes.py",
        "if pinned or len(slots) > count:",
        "if False:",
        ("tier/policies/test_own.py",),
    ),
    Mutant(
        "a slot that two loads read is given up by the first",
        "tier/entries.py",
        "if self._read_again:",
        "if not slots:",
        _MANAGER,
    ),
    Mutant(
        "a reset frees slots that copies under way use",
        "tier/manager.py",
        "SlotPool(self.num_slots, reserved=held)",
        "SlotPool(self.num_slots)",
        _MANAGER,
    ),
    Mutant(
        "a load that the step reads is not promised",
        "tier/manager.py",
        "self._promised.append((LOAD, ticket))",
        "pass",
        _MANAGER,
    ),
    Mutant(
        "a load that failed is not waited for where its blocks are handed out",
        "tier/manager.py",
        'may still write there.\n        """\n        self._loads.wait_for(ticket)',
        'may still write there.\n        """',
        _MANAGER,
    ),
    Mutant(
        "a slot of a tier that is smaller now comes back",
        "tier/state.py",
        "slot for slot in forgotten if slot < self.num_slots",
        "forgotten",
        _MANAGER,
    ),
    Mutant(
        "what ranks said of slots before a change of size counts",
        "tier/manager.py",
        "result.num_slots is not None and result.sizing == self._sizing",
        "result.num_slots is not None",
        _MANAGER,
    ),
)

TRANSFER = (
    Mutant(
        "no link goes behind another",
        "transfer/link.py",
        "return other != link and (fills or reads)",
        "return False",
        ("transfer/test_link.py",),
    ),
    Mutant(
        "a ticket may be missing",
        "transfer/link.py",
        "if transfer.ticket != self.last + 1:",
        "if transfer.ticket <= self.last:",
        ("transfer/test_engine.py",),
    ),
    Mutant(
        "a slot is loaded whose store has failed on this rank",
        "transfer/link.py",
        "if bad and not bad.isdisjoint(source_ids):",
        "if False:",
        ("transfer/test_engine.py",),
    ),
    Mutant(
        "a failure is forgotten that this rank has not told",
        "transfer/link.py",
        "min(known_done, self.told)",
        "known_done",
        ("transfer/test_engine.py",),
    ),
    Mutant(
        "the forward pass does not wait for loads",
        "transfer/engine.py",
        "link.queue.hold(None, last)",
        "link.queue.hold(None, 0)",
        ("transfer/test_engine.py",),
    ),
    Mutant(
        "the forward pass does not wait for stores",
        "transfer/engine.py",
        "link.queue.hold(None, wait)",
        "link.queue.hold(None, 0)",
        ("transfer/test_engine.py",),
    ),
    Mutant(
        "a prompt's last block comes by layer",
        "transfer/engine.py",
        "t.ticket == last and len(t.target_ids) == 1",
        "False",
        ("transfer/test_engine_by_layer.py",),
    ),
    Mutant(
        "copies do not wait for what was computed before them",
        "transfer/queue.py",
        "self.streams.blocks.wait_event(job.compute)",
        "pass",
        ("transfer/test_queue.py",),
    ),
    Mutant(
        "a copy past its deadline fails though the device has a part of it",
        "transfer/queue.py",
        "job.ticket != ticket or job.slices is not None",
        "job.ticket != ticket",
        ("transfer/test_deadline.py",),
    ),
    Mutant(
        "checksums are compared with those of other slots",
        "transfer/backends/staged.py",
        "check = Check(slots_at, own.totals, 0, finds)",
        "check = Check(0, own.totals, 0, finds)",
        ("transfer/backends/test_checksums.py",),
    ),
)

WORKER = (
    Mutant(
        "KV tensors that were replaced are read",
        _WORKER + "tier.py",
        "return bool(first_pointer(self._runner) != self._pointer)",
        "return False",
        _RANK,
    ),
    Mutant(
        "a step begins though what it reads has failed",
        _WORKER + "promises.py",
        "if found is None:\n        return",
        "return",
        _RANK,
    ),
    Mutant(
        "a call is carried out within a step of another thread",
        _WORKER + "step_order.py",
        "if self._steps_on not in (None, threading.get_ident()):",
        "if False:",
        ("integration/worker/test_step_order.py",),
    ),
    Mutant(
        "a step reads loads that nobody brings, on a rank that was closed",
        _WORKER + "lost.py",
        "if plan is not None and plan.promised:",
        "if False:",
        ("integration/worker/test_step_order.py",),
    ),
    Mutant(
        "a step begins before this rank has compared what it reads",
        _WORKER + "tier.py",
        "wait_for_known(self._engine, plan)",
        "pass",
        _RANK,
    ),
    Mutant(
        "bytes are compared where nobody asks for it, which a step may read already",
        "transfer/backends/torch.py",
        "if compared and self.checksums.kept:",
        "if self.checksums.kept:",
        _RANK,
    ),
    Mutant(
        "beside a connector the host does not wait for blocks that are handed out",
        _WORKER + "tier.py",
        "if self._beside_connector:",
        "if False:",
        _RANK,
    ),
    Mutant(
        "slots are wiped before copies under way are made",
        _WORKER + "tier.py",
        "self._engine.drain()\n        self._host.wipe()",
        "self._host.wipe()",
        _RANK,
    ),
    Mutant(
        "memory is given back before copies under way are made",
        _WORKER + "tier.py",
        "self._engine.drain()\n        self._host.resize(num_slots)",
        "self._host.resize(num_slots)",
        _RANK,
    ),
    Mutant(
        "of ranks with slots in common each says what it alone has done",
        _WORKER + "tier.py",
        "self._board.exchange_done(done, failed)",
        "done, failed",
        ("integration/worker/test_tier_together.py",),
    ),
    Mutant(
        "checksums of the round trip at start are kept",
        _WORKER + "tier.py",
        "self._checksums.forget_all()",
        "pass",
        ("integration/worker/test_tier_together.py",),
    ),
    Mutant(
        "ranks with other tokens of a block share its slot",
        _WORKER + "same_bytes.py",
        "tokens {rank % parts}",
        "tokens {0}",
        ("integration/worker/test_same_bytes.py",),
    ),
    Mutant(
        "ranks share blocks that hold states",
        _WORKER + "same_bytes.py",
        "type(spec).__name__ == _STATE",
        "False",
        ("integration/worker/test_same_bytes.py",),
    ),
    Mutant(
        "a layer does not wait for its KV",
        _WORKER + "layer_gate.py",
        "self._wait(group)",
        "pass",
        ("integration/worker/test_layer_gate.py",),
    ),
    Mutant(
        "the empty output that steps share is written to",
        _WORKER + "vllm_runner.py",
        "if not output.req_ids:",
        "if False:",
        ("integration/worker/test_vllm_runner.py",),
    ),
)

MEMORY = (
    Mutant(
        "slots that stay are touched again",
        "transfer/memory/mapping.py",
        "begin = max(step * TOUCH_BYTES, self._kept)",
        "begin = step * TOUCH_BYTES",
        ("transfer/memory/test_growth.py",),
    ),
    Mutant(
        "a store that failed before it began is not remembered",
        "transfer/queue.py",
        "job.lost()",
        "pass",
        ("transfer/test_deadline.py",),
    ),
    Mutant(
        "what a copy that failed at a slice clears up with comes into another one",
        "transfer/queue.py",
        "job.slices.close()",
        "pass",
        ("transfer/test_queue.py",),
    ),
    Mutant(
        "an engine that nobody has any more is kept by its own thread",
        "transfer/engine.py",
        "engine = weakref.ref(self)",
        "engine = lambda: self",
        ("transfer/test_dropped.py::test_one_without_copies_leaves_nothing",),
    ),
    Mutant(
        "what the device may use goes with an engine that is dropped",
        "transfer/dropped.py",
        "return all(end.query() for end in self._ends)",
        "return True",
        ("transfer/test_dropped.py",),
    ),
    Mutant(
        "a change of size waits for ever for a driver that does not return",
        "transfer/memory/growth.py",
        "if self._thread.is_alive():",
        "if False:",
        (
            "transfer/memory/test_growth.py::test_a_driver_that_does_not_return_fails_a_change_of_size",
        ),
    ),
    Mutant(
        "registering does not let the launch of a step pass",
        "transfer/memory/growth.py",
        "self._launched.wait(LAUNCH_PASSES_S)",
        "pass",
        ("transfer/memory/test_growth.py",),
    ),
    Mutant(
        "a control connection that cannot be taken closes the socket",
        "control/listener.py",
        "time.sleep(AGAIN_S)",
        "self.close()",
        ("control/test_listener.py",),
    ),
    Mutant(
        "memory that a late copy may use is given back",
        _WORKER + "rpc.py",
        "_NOT_FREED.append(tier)",
        "pass",
        _RANK,
    ),
)
