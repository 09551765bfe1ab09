"""The test of a file is found by its name: tests/ has the folders of kvoffload_patch/.

`tier/slots.py` is tested by `tests/tier/test_slots.py`, and what does not fit in there by
`tests/tier/test_slots_TOPIC.py`. The numbers of every `tuning.py` are looked at by
`tests/test_constants.py`. What departs from that is listed here, and nothing is listed that does
not.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "kvoffload_patch"

# Modules without a test of their own, and the test that shows what they do.
TESTED_BY = {
    "__main__.py": "cli/test_main.py",
    # Steps of a command, seen from its output.
    "cli/bench/errors.py": "cli/bench/test_command.py",
    "cli/bench/picture.py": "cli/bench/test_report.py",
    "cli/doctor/findings.py": "cli/doctor/test_command.py",
    "cli/launch.py": "cli/test_main.py",
    "cli/preflight.py": "cli/test_main.py",
    "cli/report.py": "cli/test_main.py",
    "cli/patch_files.py": "cli/test_patch.py",
    "control/errors.py": "control/test_wire.py",
    # Hooks are thin: a tier is tested through them, on vLLM's own objects.
    "integration/engine/hooks.py": "integration/engine/test_attach.py",
    "integration/engine/unsent.py": "integration/engine/test_breaker.py",
    "integration/frontend/hooks.py": "integration/test_carrier.py",
    "integration/worker/hooks.py": "integration/worker/test_vllm_runner.py",
    "integration/worker/lost.py": "integration/worker/test_unheard.py",
    "integration/worker/rpc.py": "integration/engine/ranks/test_workers.py",
    # What a rank's steps show.
    "integration/worker/promises.py": "integration/worker/test_tier.py",
    # Rows of the table, and what makes one.
    "integration/patch_table/called.py": "integration/patch_table/test_points.py",
    "integration/patch_table/shape.py": "integration/patch_table/test_points.py",
    "integration/patch_table/verified.py": "integration/patch_table/test_points.py",
    # What a decision reads: sources, records, the live function.
    "patching/live.py": "patching/test_patchset.py",
    "patching/records.py": "patching/test_check_verified.py",
    "patching/sources.py": "patching/test_check.py",
    # A part of the check at start.
    "integration/engine/eligible_states.py": "integration/engine/test_eligibility.py",
    # Data, names and errors: the tests of their users show what they hold.
    "integration/errors.py": "integration/engine/test_eligibility.py",
    "integration/protocol.py": "integration/worker/test_vllm_runner.py",
    "patching/errors.py": "patching/test_check.py",
    "patching/point.py": "patching/test_check.py",
    "tier/entries.py": "tier/test_manager.py",
    "tier/queues.py": "tier/test_manager.py",
    "tier/state.py": "tier/test_manager.py",
    "tier/stats.py": "tier/test_manager.py",
    # One test for all backends: they do the same.
    "transfer/backends/base.py": "transfer/backends/test_backends.py",
    "transfer/backends/torch.py": "transfer/backends/test_backends.py",
    "transfer/devices/host.py": "transfer/test_device.py",
    "transfer/backends/tiles.py": "transfer/backends/test_kernels.py",
    "transfer/integrity.py": "transfer/backends/test_checksums.py",
}

# Tests of more than one module.
ACROSS = {
    "integration/engine/test_moved.py",
    "integration/engine/test_paths.py",
    "integration/engine/test_random_beside.py",
    "integration/engine/test_random_control.py",
    "integration/engine/test_random_faults.py",
    "integration/engine/test_random_found.py",
    "integration/engine/test_random_hits.py",
    "integration/engine/test_random_hung.py",
    "integration/engine/test_random_invalid.py",
    "integration/engine/test_random_losses.py",
    "integration/engine/test_random_ranks.py",
    "integration/engine/test_random_router.py",
    "integration/engine/test_random_runs.py",
    "integration/engine/test_random_streams.py",
    "integration/engine/test_random_trained.py",
    "integration/engine/test_random_waste.py",
    "test_budgets.py",
    "test_constants.py",
    "test_costs.py",
    "test_docs.py",
    "test_environment.py",
    "test_gpu_marked.py",
    "test_layers.py",
    "test_mirror.py",
    "test_oldest_python.py",
    "test_packaging.py",
    "test_replaced.py",
    "test_security.py",
    "test_sentences.py",
    "test_unused.py",
    "transfer/backends/test_backends.py",
    "transfer/backends/test_checksums.py",
    "test_warm.py",
}

# Folders of tests that do not mirror the package: what they run is all of it, or scripts/.
OF_THEIR_OWN = {"data", "engine", "scheduler_half", "scripts"}

MODULES = sorted(
    str(file.relative_to(PACKAGE))
    for file in PACKAGE.rglob("*.py")
    if file.name not in ("__init__.py", "tuning.py")
)
TEST_FILES = sorted(
    str(file.relative_to(TESTS))
    for file in TESTS.rglob("test_*.py")
    if file.relative_to(TESTS).parts[0] not in OF_THEIR_OWN
)


def named_after(module: str) -> list[str]:
    """The tests that a module has by its name; a leading underscore does not count."""
    folder, _, file = module.rpartition("/")
    stem = f"{folder}/test_{file.removesuffix('.py').lstrip('_')}".lstrip("/")
    return [test for test in TEST_FILES if test == f"{stem}.py" or test.startswith(f"{stem}_")]


@pytest.mark.parametrize("module", MODULES)
def test_a_module_has_a_test_by_its_name_or_a_row_that_says_which(module: str) -> None:
    if module in TESTED_BY:
        assert named_after(module) == [], "it has a test of its own: take its row out"
    else:
        assert named_after(module) != []


def test_every_row_names_a_module_and_a_test_that_exist() -> None:
    assert set(TESTED_BY) <= set(MODULES)
    assert set(TESTED_BY.values()) | ACROSS <= set(TEST_FILES)


def test_every_test_is_of_a_module_or_known_to_be_of_several() -> None:
    named = {test for module in MODULES for test in named_after(module)}
    assert len(named) > 30, "found hardly any: is this looking at the package?"
    assert set(TEST_FILES) - named == ACROSS


def test_every_folder_of_tests_mirrors_one_of_the_package_or_is_known_not_to() -> None:
    found = {file.parent.relative_to(TESTS) for file in TESTS.rglob("*.py")}
    mirrored = {path for path in found if path.parts and path.parts[0] not in OF_THEIR_OWN}
    assert len(mirrored) > 5
    assert [str(path) for path in mirrored if not (PACKAGE / path).is_dir()] == []
