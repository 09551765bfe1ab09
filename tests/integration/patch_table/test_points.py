"""The table of patch points against every release's snapshot, and against the installed vLLM.

The snapshots in tests/data/vllm say what each release has where the table looks; stub modules
made from them stand in for its sources, so that no vLLM is needed. scripts/release snapshot
writes them.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kvoffload_patch.integration.patch_table.points import POINTS, SUPPORTED_VLLM, VLLM
from kvoffload_patch.patching import PatchPoint, decide, find_source, installed_version
from kvoffload_patch.patching.check import check_table
from kvoffload_patch.patching.errors import SignatureMismatch, UnsupportedVersion

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "tests" / "data" / "vllm"
SNAPSHOTS: dict[str, dict[str, Any]] = {
    file.stem: json.loads(file.read_text())
    for file in sorted(FOLDER.glob("*.json"), key=lambda file: Version(file.stem))
}
SUPPORTED = [release for release in SNAPSHOTS if release in SpecifierSet(SUPPORTED_VLLM)]
NEWEST = SUPPORTED[-1]
NEXT = f"0.{Version(NEWEST).minor + 1}.0"  # nobody knows yet what will be in it
TOO_OLD = ["0.8.5", "0.9.0", "0.9.0.1"]
NAMES = list(dict.fromkeys(p.name for p in POINTS))
# All of these are built from the sources of the release that they are put behind.
SUFFIXES = ["", "rc1", "a1", ".dev7+gabc", "+cu118", "+cpu", ".post2", ".post1.dev3+g0a1.cu129"]


def test_the_range_reaches_from_the_oldest_to_the_newest_snapshot() -> None:
    assert list(SNAPSHOTS) == TOO_OLD + SUPPORTED
    assert SUPPORTED[0] == "0.9.1" and len(SUPPORTED) >= 41
    minors = sorted({Version(release).minor for release in SUPPORTED})
    assert minors == list(range(9, Version(NEWEST).minor + 1)) and minors[-1] >= 33


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_name_is_selected_once_for_each_release(suffix: str) -> None:
    patches = [f"0.{minor}.{n}" for minor in range(9, Version(NEWEST).minor + 1) for n in range(4)]
    possible = [release for release in patches if release in SpecifierSet(SUPPORTED_VLLM)]
    assert len(possible) > 95
    check_table(POINTS, [release + suffix for release in (*SUPPORTED, *possible)])


def test_each_row_gives_its_reasons() -> None:
    assert all(p.why and p.remove_when for p in POINTS)


@pytest.mark.parametrize("release", SNAPSHOTS)
def test_a_snapshot_says_something_of_every_target(release: str) -> None:
    assert SNAPSHOTS[release]["release"] == release
    assert unsaid(SNAPSHOTS[release]) == ""


@pytest.mark.parametrize("release", SUPPORTED)
def test_a_supported_release_matches_its_points(release: str, tmp_path: Path) -> None:
    decided = decide(VLLM, POINTS, release, stubs(SNAPSHOTS[release], tmp_path))
    assert [p.name for p in decided.points] == NAMES
    hooked = {p.name for p in decided.points if p.hook}
    assert {p.name for p in (*decided.wrapped, *decided.set_on_objects)} == hooked
    assert {p.attribute.partition(".")[0] for p in decided.wrapped} <= {
        "EngineCore",
        "GPUModelRunner",
        "LLMEngine",
    }, "a hook of every step stands on a class"


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.33.0rc1", "0.33.0"),
        ("0.9.2+cu118", "0.9.2"),
        ("0.10.1.1", "0.10.1.1"),
        ("0.11.0.post2", "0.11.0"),
        ("0.32.0.dev7+gabc", "0.32.0"),
    ],
)
def test_a_build_is_patched_like_its_release(version: str, release: str, tmp_path: Path) -> None:
    sources = stubs(SNAPSHOTS[release], tmp_path)
    built = decide(VLLM, POINTS, version, sources)
    assert built.version == version
    assert built.points == decide(VLLM, POINTS, release, sources).points


def test_every_row_is_used_by_some_release(tmp_path: Path) -> None:
    used = set()
    for release in SUPPORTED:
        sources = stubs(SNAPSHOTS[release], tmp_path / release)
        used |= {id(p) for p in decide(VLLM, POINTS, release, sources).points}
    assert [(p.name, p.versions) for p in POINTS if id(p) not in used] == []


@pytest.mark.parametrize("release", [*TOO_OLD, "0.9.0+cu128", NEXT, f"{NEXT}rc1", "1.0.0"])
def test_other_releases_are_refused_before_any_source_is_read(release: str) -> None:
    def unread(module: str) -> Path:
        raise AssertionError(f"{module} was looked for")

    with pytest.raises(UnsupportedVersion) as refusal:
        decide(VLLM, POINTS, release, unread)
    assert str(refusal.value) == (
        f"vLLM {release} is not supported (supported: {SUPPORTED_VLLM}); "
        "set KVOFFLOAD_STRICT=0 to serve without the CPU tier."
    )


def test_the_snapshots_of_neighbours_are_told_apart(tmp_path: Path) -> None:
    """The check is no formality: most changes of the table tell two releases apart."""
    refused = 0
    for older, newer in zip(SUPPORTED, SUPPORTED[1:]):
        sources = stubs(SNAPSHOTS[newer], tmp_path / newer)
        try:
            decided = decide(VLLM, POINTS, older, sources)
        except SignatureMismatch:
            refused += 1
        else:
            assert [p.name for p in decided.points] == NAMES
    assert refused >= 10


def test_a_snapshot_that_lacks_a_target_says_what_to_run() -> None:
    taken = copy.deepcopy(SNAPSHOTS[NEWEST])
    del taken["targets"]["vllm.v1.core.block_pool:BlockPool.touch"]
    assert unsaid(taken) == (
        f"tests/data/vllm/{NEWEST}.json does not say what "
        "vllm.v1.core.block_pool:BlockPool.touch looks like, which the table names; "
        "run python scripts/release snapshot --all."
    )
    with pytest.raises(AssertionError, match=r"run python scripts/release snapshot --all\.$"):
        stubs(taken, Path("never-written"))
    assert not Path("never-written").exists()


# --- Refused when vLLM is imported: nothing of it has run, and nothing could be patched. ---

Change = Callable[[dict[str, Any]], None]


def change(target: str, old: str | None, new: str) -> Change:
    def apply(taken: dict[str, Any]) -> None:
        assert taken["targets"][target] == old, f"{target} {taken['targets'][target]}"
        taken["targets"][target] = new

    return apply


POOL = "vllm.v1.core.block_pool:BlockPool"
SCHEDULE = "vllm.v1.core.sched.scheduler:Scheduler.schedule"
CHANGED: list[tuple[str, Change, str]] = [
    (
        "a parameter has another name",
        change(
            f"{POOL}.get_new_blocks",
            "(self, num_blocks) -> list[KVCacheBlock]",
            "(self, count) -> list[KVCacheBlock]",
        ),
        "pool.get_new_blocks takes (self, count), expected (self, num_blocks)",
    ),
    (
        "a parameter was put before",
        change(f"{POOL}.touch", "(self, blocks) -> None", "(self, owner, blocks) -> None"),
        "pool.touch takes (self, owner, blocks), expected (self, blocks)",
    ),
    (
        "another return shape",
        change(
            SCHEDULE,
            "(self, throttle_prefills) -> SchedulerOutput",
            "(self, throttle_prefills) -> tuple[SchedulerOutput, int]",
        ),
        "scheduler.schedule returns 'tuple[SchedulerOutput, int]', expected 'SchedulerOutput'",
    ),
    (
        "a property",
        change(f"{POOL}.get_num_free_blocks", "(self) -> int", "property (self) -> int"),
        "pool.get_num_free_blocks is a property, expected a function",
    ),
]


@pytest.mark.parametrize(("apply", "found"), [c[1:] for c in CHANGED], ids=[c[0] for c in CHANGED])
def test_a_release_that_changed_is_refused_untouched(
    apply: Change, found: str, tmp_path: Path
) -> None:
    taken = copy.deepcopy(SNAPSHOTS[NEWEST])
    apply(taken)
    assert import_vllm(taken, NEWEST, tmp_path) == [
        f"kvoffload_patch: 1 of {len(NAMES)} patch points do not match vLLM {NEWEST}: {found}. "
        "Nothing was patched; set KVOFFLOAD_STRICT=0 to serve without the CPU tier.",
        "imported: []",
    ]


def test_an_unknown_release_is_refused_untouched(tmp_path: Path) -> None:
    assert import_vllm(SNAPSHOTS[NEWEST], NEXT, tmp_path) == [
        f"kvoffload_patch: vLLM {NEXT} is not supported (supported: {SUPPORTED_VLLM}); "
        "set KVOFFLOAD_STRICT=0 to serve without the CPU tier.",
        "imported: []",
    ]


def test_the_same_release_unchanged_is_armed(tmp_path: Path) -> None:
    """So the refusals above come of the change."""
    assert import_vllm(SNAPSHOTS[NEWEST], NEWEST, tmp_path) == [
        "vllm runs",
        "imported: ['vllm', 'wrapt']",
    ]


def test_a_missing_module_is_named_for_each_of_its_points(tmp_path: Path) -> None:
    taken = copy.deepcopy(SNAPSHOTS[NEWEST])
    taken["modules"]["vllm.v1.core.block_pool"] = False
    with pytest.raises(SignatureMismatch) as refusal:
        decide(VLLM, POINTS, NEWEST, stubs(taken, tmp_path))
    text = str(refusal.value)
    assert "pool.touch not found: there is no vllm/v1/core/block_pool.py; " in text
    gone = [p for p in decided_for(NEWEST, tmp_path / "whole") if "block_pool" in p.module]
    assert text.startswith(f"{len(gone)} of {len(NAMES)} patch points do not match vLLM {NEWEST}: ")


def test_what_must_be_absent_is_complained_of_where_it_is(tmp_path: Path) -> None:
    taken = copy.deepcopy(SNAPSHOTS[SUPPORTED[0]])
    target = "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens"
    change(target, None, "(self, grammar_output) -> ModelRunnerOutput")(taken)
    with pytest.raises(SignatureMismatch) as refusal:
        decide(VLLM, POINTS, SUPPORTED[0], stubs(taken, tmp_path))
    assert str(refusal.value) == (
        f"1 of {len(NAMES)} patch points do not match vLLM {SUPPORTED[0]}: "
        "runner_v1.sample_tokens exists, expected none. Nothing was patched; "
        "set KVOFFLOAD_STRICT=0 to serve without the CPU tier."
    )


# --- The vLLM that is installed; its files are read, and it is not imported. ---

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


@needs_vllm
def test_the_installed_release_matches() -> None:
    decision = decide(VLLM, POINTS, installed_version(VLLM))
    assert [p.name for p in decision.points] == NAMES


@needs_vllm
def test_changed_signatures_are_named_in_one_sentence(tmp_path: Path) -> None:

    def copied(module: str) -> Path:
        file = tmp_path / f"{module}.py"
        if not file.exists():
            shutil.copy(find_source(module), file)
        return file

    _replace(copied("vllm.v1.core.block_pool"), "self, num_blocks: int)", "self, count: int)")
    _replace(
        copied("vllm.v1.core.sched.scheduler"),
        "def reset_prefix_cache(\n        self, reset_running_requests: bool = False, "
        "reset_connector: bool = False\n    ) -> bool:",
        "def reset_prefix_cache(self, reset_running_requests, reset_connector) -> int:",
    )
    with pytest.raises(SignatureMismatch) as refusal:
        decide(VLLM, POINTS, installed_version(VLLM), copied)
    text = str(refusal.value)
    assert text.startswith(f"2 of {len(NAMES)} patch points do not match")
    assert "pool.get_new_blocks takes (self, count), expected (self, num_blocks)" in text
    assert "scheduler.reset_prefix_cache returns 'int', expected 'bool'" in text
    assert "\n" not in text and text.endswith(f"{VLLM.remedy}.")


def _replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, old
    file.write_text(text.replace(old, new))


# --- Stub modules from a snapshot. ---


def unsaid(taken: dict[str, Any]) -> str:
    """One sentence about the targets of the table that a snapshot does not know, or ""."""
    missing = sorted({f"{p.module}:{p.attribute}" for p in POINTS} - set(taken["targets"]))
    if not missing:
        return ""
    return (
        f"tests/data/vllm/{taken['release']}.json does not say what {' and '.join(missing)} "
        "looks like, which the table names; run python scripts/release snapshot --all."
    )


def stubs(taken: dict[str, Any], folder: Path) -> Callable[[str], Path]:
    """Write modules with the snapshot's targets, and nothing else; give decide's `find_source`."""
    if unsaid(taken):
        raise AssertionError(unsaid(taken))
    texts = {
        module: module_text(taken, module)
        for module, is_there in taken["modules"].items()
        if is_there
    }

    def path(module: str) -> Path:
        return folder.joinpath(*module.split(".")).with_suffix(".py")

    for module, text in texts.items():
        path(module).parent.mkdir(parents=True, exist_ok=True)
        path(module).write_text(text)

    def find(module: str) -> Path:
        if module not in texts:
            raise FileNotFoundError(path(module))
        return path(module)

    return find


def module_text(taken: dict[str, Any], module: str) -> str:
    """Source of a stub module; a header is "(parameters) -> returns", or that after "property"."""
    bodies: dict[str, list[str]] = {"": []}
    for target, header in taken["targets"].items():
        if target.startswith(f"{module}:") and header is not None:
            owner, _, name = target.partition(":")[2].rpartition(".")
            kind, _, signature = header.partition("(")
            indent = "    " if owner else ""
            body = bodies.setdefault(owner, [f"class {owner}:"])
            body += [f"{indent}@property"] if kind else []
            body.append(f"{indent}def {name}({signature}: ...")
    return "\n".join(line for body in bodies.values() for line in body) + "\n"


def decided_for(release: str, folder: Path) -> tuple[PatchPoint, ...]:
    return decide(VLLM, POINTS, release, stubs(SNAPSHOTS[release], folder)).points


IMPORT = """\
import sys
from kvoffload_patch import _bootstrap
_bootstrap.main()
try:
    import vllm
except ImportError as refusal:
    print(refusal)
seen = {name.partition(".")[0] for name in sys.modules}
print("imported:", sorted(seen & {"vllm", "wrapt"}))  # without wrapt nothing is patched
"""


def import_vllm(taken: dict[str, Any], release: str, folder: Path) -> list[str]:
    """What a process prints that imports a vLLM of this release with our start-up hook."""
    stubs(taken, folder)
    (folder / "vllm" / "__init__.py").write_text("print('vllm runs')\n")
    info = folder / f"vllm-{release}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}\n")
    others = {k: v for k, v in os.environ.items() if not k.startswith("KVOFFLOAD_")}
    env = {**others, "KVOFFLOAD_ENABLE": "1", "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], env=env, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
