"""The faults of `scripts/matrix mutants` on the engine's side, as `mutants_list.py` has the others.

Nearly all of their tests import vLLM, which takes most of their time.
"""

from __future__ import annotations

from scripts.matrix.mutants_list import Mutant

_FILES = "integration/engine/"
_ADMISSION = "integration/engine/requests/test_admission.py::"
_LOOKUP = "integration/engine/requests/test_lookup.py::"
_RAISED = "integration/engine/test_breaker_beside.py::"
_SCHEDULER = "integration/engine/adapters/test_vllm_scheduler.py::"
_CHOICE = "integration/engine/blocks/test_store_choice.py::"
_UNHEARD = "integration/worker/test_unheard.py"
_LORA = "integration/engine/adapters/test_vllm_lora.py"

ENGINE = (
    Mutant(
        "running prompts are left out of the bound on blocks",
        _FILES + "adapters/vllm_scheduler.py",
        "blocks += self.groups.new_blocks(request, todo)",
        "blocks += 0",
        (_ADMISSION + "test_a_load_leaves_running_prompts_their_blocks",),
    ),
    Mutant(
        "the watermark is 0",
        _FILES + "adapters/vllm_scheduler.py",
        'int(getattr(self.manager, "watermark_blocks", 0))',
        "0",
        (_ADMISSION + "test_a_load_leaves_vllm_its_watermark",),
    ),
    Mutant(
        "lookahead tokens of a decode take no blocks",
        _FILES + "adapters/vllm_groups.py",
        "self.decode_tokens + int(scheduler.num_lookahead_tokens)",
        "self.decode_tokens",
        (_SCHEDULER + "test_the_bound_on_blocks_for_running_requests_holds",),
    ),
    Mutant(
        "lookahead tokens of a prompt take no blocks",
        _FILES + "adapters/vllm_groups.py",
        "done + tokens + self._scheduler.num_lookahead_tokens",
        "done + tokens",
        (_SCHEDULER + "test_the_bound_on_blocks_for_running_requests_holds",),
    ),
    Mutant(
        "a sliding window is as long as the prompt",
        _FILES + "adapters/vllm_groups.py",
        "return -(-(seen + int(ahead)) // size)",
        "return None",
        (_FILES + "adapters/test_vllm_groups.py::test_a_window_of_many_layers_is_that_of_one",),
    ),
    Mutant(
        "hits of several groups are not in the order of the prefix",
        _FILES + "requests/lookup.py",
        "hits.sort(key=itemgetter(0))",
        "pass",
        (_LOOKUP + "test_blocks_of_several_groups_are_loaded_in_prefix_order",),
    ),
    Mutant(
        "a plan stores a block under a key that it has lost",
        _FILES + "tier.py",
        "else self._view.still_cached",
        "else lambda *_: True",
        (_LOOKUP + "test_a_block_is_not_stored_under_a_key_that_it_has_lost",),
    ),
    Mutant(
        "what is computed waits to be stored where a connector may take it back",
        _FILES + "blocks/store_choice.py",
        "not view.adapter.elastic and scheduler.connector is None",
        "not view.adapter.elastic",
        (_CHOICE + "test_nothing_waits_where_no_step_is_sure_to_come_or_a_connector_is",),
    ),
    Mutant(
        "stores wait for a step that does not come",
        _FILES + "blocks/store_choice.py",
        "0 < running >= num_blocks",
        "running >= num_blocks",
        (_CHOICE + "test_nothing_waits_where_no_step_is_sure_to_come_or_a_connector_is",),
    ),
    Mutant(
        "keys of blocks that nobody computes stay in vLLM's prefix cache",
        _FILES + "blocks/store_choice.py",
        "self._uncache([block for block in blocks if not block.ref_cnt])",
        "pass",
        (_CHOICE + "test_keys_of_blocks_that_no_step_computes_leave_vllms_cache",),
    ),
    Mutant(
        "a load that a rank begins after a reset is not waited for",
        _FILES + "requests/loads.py",
        "self._manager.await_load(load.ticket)\n"
        "            self._view.release(reversed(load.blocks))\n        self.under_way",
        "self._view.release(reversed(load.blocks))\n        self.under_way",
        (
            "integration/engine/test_tier.py::"
            "test_a_load_that_a_rank_begins_after_a_reset_is_waited_for",
        ),
    ),
    Mutant(
        "a size is changed beside a step that may use the slots",
        _FILES + "control.py",
        "if ranks.beside_steps and self._tier.pace.in_flight:",
        "if False:",
        (
            "integration/engine/test_control.py::"
            "test_where_calls_come_beside_steps_no_size_is_changed_while_one_is_under_way",
        ),
    ),
    Mutant(
        "a hit is stored again from a block that has lost its key",
        _FILES + "blocks/recency.py",
        "keys, self._view.still_cached)",
        "keys, lambda *_: True)",
        (_LOOKUP + "test_a_hit_that_has_left_the_gpu_since_leaves_the_store_of_its_block_alone",),
    ),
    Mutant(
        "a parked load is published before it is done",
        _FILES + "requests/loads.py",
        "if self._manager.load_done(load.ticket):",
        "if True:",
        (_LOOKUP + "test_a_parked_load_is_published_when_its_ticket_is_done",),
    ),
    Mutant(
        "parked mode promises loads that are not done",
        _FILES + "tier.py",
        'settings.load_mode != "parked"',
        "True",
        (_LOOKUP + "test_what_crosses_before_the_step_can_begin_or_soon_after_counts_as_done",),
    ),
    Mutant(
        "a parked load that failed is published",
        _FILES + "requests/loads.py",
        "if self._manager.load_failed(load.ticket) or",
        "if",
        (_FILES + "test_tier.py::test_a_parked_load_that_failed_is_not_published",),
    ),
    Mutant(
        "a parked request takes tokens of the step",
        _FILES + "requests/admission.py",
        "budget.reserve(budget.needed)",
        "budget.admit(request, result.tokens)",
        (_FILES + "test_tier.py::test_a_parked_request_takes_none_of_the_steps_tokens",),
    ),
    Mutant(
        "the cap on admissions stays when schedule raises",
        _FILES + "breaker.py",
        "self._view.schedule_over()\n        except BaseException as error:  # noqa: BLE001 - the",
        "pass\n        except BaseException as error:  # noqa: BLE001 - the",
        (_ADMISSION + "test_the_limit_is_back_when_schedule_is_over",),
    ),
    Mutant(
        "the tier stays after a schedule that raised",
        _FILES + "breaker.py",
        'if not self.detached:\n            self.failed("step", RuntimeError(_RAISED))',
        "pass",
        (_RAISED + "test_who_goes_on_after_a_step_that_raised_has_plain_vllm",),
    ),
    Mutant(
        "the tier stays after a step that raised",
        _FILES + "breaker.py",
        "lost = under_way is not None and",
        "lost = under_way is None and",
        (_RAISED + "test_who_goes_on_after_a_step_that_raised_has_plain_vllm",),
    ),
    Mutant(
        "the tier stays after an interrupt between two parts of a hook",
        _FILES + "breaker.py",
        "if lost or self._depth:",
        "if lost:",
        (_RAISED + "test_who_goes_on_after_an_interrupt_between_two_parts_has_plain_vllm",),
    ),
    Mutant(
        "a lookup is kept though a block that it rests on was handed out",
        _FILES + "requests/lookup.py",
        "if self._by_block:",
        "if False:",
        (_FILES + "requests/test_lookup_cache.py",),
    ),
    Mutant(
        "a request that ends by the output of an earlier step leaves its load behind",
        _FILES + "tier.py",
        "self.on_finish(output.finished_req_ids)",
        "pass",
        (_LOOKUP + "test_what_is_kept_of_a_request_goes_with_the_output_that_says_it_has_ended",),
    ),
    Mutant(
        "an output without what is done is taken in",
        _FILES + "tier.py",
        "if result is None:\n            raise PromiseBroken(",
        "if result is None:\n            return\n            raise PromiseBroken(",
        (_FILES + "test_tier.py::test_an_output_without_what_is_done_ends_the_engine",),
    ),
    Mutant(
        "a detached tier forgets the loads of the step that is about to run",
        _FILES + "unsent.py",
        "return plan._replace(after=())",
        "return None",
        (
            _FILES
            + "test_breaker.py::test_a_plan_that_is_on_the_output_already_is_carried_out_once",
        ),
    ),
    Mutant(
        "nobody asks whether a rank that reports nothing has carried out a step",
        _FILES + "tier.py",
        "if failure := self._ranks.step_failure():",
        "if failure := str():",
        (_FILES + "test_tier.py::test_no_token_leaves_of_a_step_that_has_failed_on_another_rank",),
    ),
    Mutant(
        "a load that is compared is promised before it is done",
        _FILES + "requests/loads.py",
        "if load.compared:",
        "if False:",
        (_FILES + "requests/test_loads_compared.py",),
    ),
    Mutant(
        "loads are read unseen before one has come right",
        _FILES + "requests/inline.py",
        "not self._loads.found_right or self._stats.mismatches > 0",
        "self._stats.mismatches > 0",
        (_FILES + "requests/test_loads_compared.py",),
    ),
    Mutant(
        "a load that is to be compared may be within its step",
        _FILES + "requests/admission.py",
        "if not compared and self._inline(",
        "if self._inline(",
        (_FILES + "requests/test_loads_compared.py",),
    ),
    Mutant(
        "who hits what a parked load brings loads the rest within its step",
        _FILES + "requests/admission.py",
        "if result.arriving:\n            return False",
        "pass",
        (
            _FILES
            + "requests/test_loads_failed.py::test_who_hits_what_a_parked_load_brings_waits_for_it",
        ),
    ),
    Mutant(
        "a copy that has failed on a rank is said to be done and no more",
        "integration/slot_counts.py",
        "if not failed:",
        "if True:",
        ("integration/test_slot_counts.py",),
    ),
    Mutant(
        "a load is done when one rank has compared it",
        "integration/worker/tier.py",
        "if self._board is not None:\n            done, failed",
        "if self._board is not None and not self.compares:\n            done, failed",
        ("integration/worker/test_tier_together.py",),
    ),
    Mutant(
        "a failure that is known is not told to the ranks",
        "tier/manager.py",
        "or self._new_loads or failed):",
        "or self._new_loads):",
        ("tier/test_manager_failures.py",),
    ),
    Mutant(
        "a rank says what nobody sees in place of raising",
        "integration/engine/ranks/workers.py",
        "all(found for found, _ in reached) and self._watch(board)",
        "all(found for found, _ in reached) and (self._watch(board) or True)",
        (
            "integration/engine/ranks/test_workers_together.py"
            "::test_ranks_say_nothing_in_memory_that_the_engine_does_not_see",
        ),
    ),
    Mutant(
        "a tier is detached though a rank has said that a step of it has failed",
        "integration/worker/unheard.py",
        "if self._board is not None and self._board.alarm:",
        "if False:",
        (_UNHEARD,),
    ),
    Mutant(
        "a rank that reports nothing raises",
        "integration/worker/rpc.py",
        "RankTier if reports(worker) else UnheardRank",
        "RankTier",
        (_UNHEARD,),
    ),
    Mutant(
        "a step that has failed on a rank that reports nothing is not said",
        "integration/worker/unheard.py",
        "self._board.ring()",
        "pass",
        (_UNHEARD,),
    ),
    Mutant(
        "a step begins after one that has failed",
        "integration/worker/tier.py",
        "if self._lost is not None:",
        "if False:",
        ("integration/worker/test_tier.py::test_no_step_begins_after_one_that_has_failed",),
    ),
    Mutant(
        "KV tensors that the runner's list leaves out are not moved",
        "integration/worker/vllm_runner.py",
        "tensors += _left_out(runner, tensors)",
        "pass",
        ("integration/worker/test_vllm_runner.py",),
    ),
    Mutant(
        "an engine that goes on after a failed step is taken",
        _FILES + "eligibility.py",
        'getattr(parallel, "enable_fault_tolerance", False)',
        "False",
        (_FILES + "test_eligibility.py::test_what_the_tier_cannot_vouch_for_is_refused",),
    ),
    Mutant(
        "ranks with a scheduler each have a tier each",
        "integration/engine/ranks/checks.py",
        "together != len(ranks)",
        "together < len(ranks)",
        ("integration/engine/ranks/test_checks.py",),
    ),
    Mutant(
        "a state is loaded a token too early",
        _FILES + "requests/full_prompt.py",
        "and not view.state_groups",
        "and True",
        (_FILES + "requests/test_full_prompt.py",),
    ),
    Mutant(
        "what is forgotten is not wiped",
        _FILES + "tier.py",
        "if self.settings.wipe:",
        "if False:",
        (_FILES + "test_control.py::test_what_is_forgotten_is_overwritten_if_it_is_to_be",),
    ),
    Mutant(
        "digests of weights are not compared",
        _FILES + "blocks/weights.py",
        "all(found) and found == self._known",
        "all(found)",
        (_FILES + "blocks/test_weights.py::test_weights_that_were_changed_in_sleep_empty_it",),
    ),
    Mutant(
        "any reset while sleep waits for requests is taken for that of sleep",
        _FILES + "blocks/weights.py",
        "asleep = self._falls_asleep and at_rest",
        "asleep = self._falls_asleep",
        (_FILES + "blocks/test_weights.py",),
    ),
    Mutant(
        "an adapter that was loaded again gets KV of the one before",
        _FILES + "requests/admission.py",
        "if not self._view.is_stale(request):",
        "if True:",
        (_LORA,),
    ),
    Mutant(
        "a session keeps the key of a block that a forgotten token has ended",
        _FILES + "adapters/vllm_sessions.py",
        "del session.block_hashes[session.num_computed_tokens // hash_size :]",
        "pass",
        (_FILES + "adapters/test_vllm_sessions.py",),
    ),
    Mutant(
        "a turn of a session is taken for a prompt",
        _FILES + "requests/full_prompt.py",
        'if getattr(request, "resumable", False):',
        "if False:",
        (_FILES + "requests/test_full_prompt.py",),
    ),
    Mutant(
        "a session that opts out goes on as it began",
        _FILES + "blocks/store_choice.py",
        "self._recency.keys.pop(session.request_id, None)",
        "pass",
        (_CHOICE.removesuffix("::"),),
    ),
    Mutant(
        "what is loaded while weights are updated is published",
        _FILES + "requests/loads.py",
        "load.stale = True",
        "pass",
        (_FILES + "requests/test_loads_failed.py",),
    ),
    Mutant(
        "references of the tier count as those of requests",
        _FILES + "breaker.py",
        "if not self.detached:\n                self._view.adapter.disclaim(output)",
        "pass",
        (_FILES + "test_breaker.py::test_no_common_prefix_is_told_while_the_tier_holds_blocks",),
    ),
)
