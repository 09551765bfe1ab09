"""The table of patch points against every release's snapshot, and against the installed vLLM.

The snapshots in tests/data/vllm say what each release has where the table looks; stub modules
made from them stand in for its sources, so that no vLLM is needed. scripts/release snapshot
writes them.
"""

from __future__ import annotations

import copy
import dataclasses
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

from kvoffload_patch.integration.patch_table.attributes import ATTRIBUTES
from kvoffload_patch.integration.patch_table.points import POINTS, VLLM
from kvoffload_patch.integration.patch_table.verified import RECORDS, RELEASES, SUPPORTED_VLLM
from kvoffload_patch.patching import (
    PatchPoint,
    decide,
    find_source,
    installed_version,
    release_of,
)
from kvoffload_patch.patching.check import fingerprint, select
from kvoffload_patch.patching.errors import (
    SignatureMismatch,
    UnsupportedVersion,
    UnverifiedHost,
)
from kvoffload_patch.patching.sources import Sources

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "tests" / "data" / "vllm"
SNAPSHOTS: dict[str, dict[str, Any]] = {
    file.stem: json.loads(file.read_text())
    for file in sorted(FOLDER.glob("*.json"), key=lambda file: Version(file.stem))
}
# Headers and attributes only: what the stubs' functions do is no release's.
ANY_BODY = dataclasses.replace(VLLM, records=None)
SUPPORTED = list(RELEASES)
NEWEST = SUPPORTED[-1]
NEXT = f"0.{Version(NEWEST).minor + 1}.0"  # nobody knows yet what will be in it
FAR = f"0.{Version(NEWEST).minor + 2}.0"
TOO_OLD = ["0.8.5", "0.9.0", "0.9.0.1"]
NAMES = list(dict.fromkeys(p.name for p in POINTS))
# All of these are built from the sources of the release that they are put behind.
SUFFIXES = ["", "rc1", "a1", ".dev7+gabc", "+cu118", "+cpu", ".post2", ".post1.dev3+g0a1.cu129"]


def test_the_data_are_those_of_this_table() -> None:
    assert RECORDS.table == fingerprint(VLLM, POINTS), "run python scripts/release digests"
    assert {p.target for p in POINTS if not p.absent} == set(RECORDS.bodies)


def test_files_of_other_packages_are_not_compared() -> None:
    """Those of Python's own library are another in each Python."""
    assert {module.partition(".")[0] for module in RECORDS.files} == {VLLM.package}


def test_the_range_reaches_from_the_oldest_to_the_newest_snapshot() -> None:
    assert f">={SUPPORTED[0]},<0.{Version(NEWEST).minor + 1}" == SUPPORTED_VLLM
    assert list(SNAPSHOTS) == TOO_OLD + SUPPORTED
    assert SUPPORTED[0] == "0.9.1" and len(SUPPORTED) >= 41
    minors = sorted({Version(release).minor for release in SUPPORTED})
    assert minors == list(range(9, Version(NEWEST).minor + 1)) and minors[-1] >= 33


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_name_is_selected_once_for_each_release(suffix: str) -> None:
    patches = [f"0.{minor}.{n}" for minor in range(9, Version(NEWEST).minor + 1) for n in range(4)]
    possible = [release for release in patches if release in SpecifierSet(SUPPORTED_VLLM)]
    assert len(possible) > 95
    for release in (*SUPPORTED, *possible):
        assert len(select(POINTS, release_of(release + suffix))) == len(NAMES)


def test_each_row_gives_its_reasons() -> None:
    assert all(p.why for p in POINTS)


@pytest.mark.parametrize("release", SNAPSHOTS)
def test_a_snapshot_says_something_of_every_target(release: str) -> None:
    assert SNAPSHOTS[release]["release"] == release
    assert unsaid(SNAPSHOTS[release]) == ""


@pytest.mark.parametrize("release", SUPPORTED)
def test_a_supported_release_matches_its_points(release: str, tmp_path: Path) -> None:
    decided = decide(ANY_BODY, POINTS, release, stubs(SNAPSHOTS[release], tmp_path))
    assert [p.name for p in decided.points] == NAMES
    hooked = {p.name for p in decided.points if p.hook}
    assert {p.name for p in (*decided.wrapped, *decided.set_on_objects)} == hooked
    assert {p.attribute.partition(".")[0] for p in decided.wrapped} <= {
        "EngineCore",
        "GPUModelRunner",
        "LLMEngine",
        "MsgpackDecoder",
    }, "a hook of every step stands on a class"


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.9.2+cu118", "0.9.2"),
        ("0.10.1.1", "0.10.1.1"),
        ("0.11.0.post2", "0.11.0"),
        ("0.32.0+cpu", "0.32.0"),
    ],
)
def test_a_build_is_patched_like_its_release(version: str, release: str, tmp_path: Path) -> None:
    sources = stubs(SNAPSHOTS[release], tmp_path)
    built = decide(ANY_BODY, POINTS, version, sources)
    assert built.version == version
    assert built.points == decide(ANY_BODY, POINTS, release, sources).points


def test_every_row_is_used_by_some_release(tmp_path: Path) -> None:
    used = set()
    for release in SUPPORTED:
        sources = stubs(SNAPSHOTS[release], tmp_path / release)
        used |= {id(p) for p in decide(ANY_BODY, POINTS, release, sources).points}
    assert [(p.name, p.versions) for p in POINTS if id(p) not in used] == []


def unread(module: str) -> Path:
    raise AssertionError(f"{module} was looked for")


@pytest.mark.parametrize("release", [*TOO_OLD, "0.9.0+cu128", FAR, f"{FAR}rc1", "1.0.0"])
@pytest.mark.parametrize("allowed", [False, True])
def test_other_releases_are_refused_before_any_source_is_read(release: str, allowed: bool) -> None:
    with pytest.raises(UnsupportedVersion) as refusal:
        decide(VLLM, POINTS, release, unread, allow_unverified=allowed)
    reach = f"; KVOFFLOAD_ALLOW_UNVERIFIED=1 reaches {VLLM.supported} only" if allowed else ""
    assert str(refusal.value) == (
        f"vLLM {release} is not supported (supported: {SUPPORTED[0]} to {NEWEST}{reach}); "
        "install one of these, or set KVOFFLOAD_STRICT=0 to serve without the CPU tier."
    )


NOT_VERIFIED = f"this release is not one of those verified ({SUPPORTED[0]} to {NEWEST})"


@pytest.mark.parametrize(
    ("version", "why"),
    [
        (f"0.{Version(NEWEST).minor}.9", NOT_VERIFIED),
        ("0.31.7+fork", NOT_VERIFIED),
        (NEXT, NOT_VERIFIED),
        (f"{NEWEST}rc1", NOT_VERIFIED),
        ("0.31.1.dev3+gabc", NOT_VERIFIED),
        ("0.32.0.dev7+gabc.cu129", NOT_VERIFIED),
        ("0.32.0+fork", "'+fork' is not a build of vLLM's own"),
        ("0.32.0+9114fd76.nv25.10", "'+9114fd76.nv25.10' is not a build of vLLM's own"),
    ],
)
def test_what_was_not_verified_is_refused_before_any_source_is_read(version: str, why: str) -> None:
    with pytest.raises(UnverifiedHost) as refusal:
        decide(VLLM, POINTS, version, unread)
    assert str(refusal.value) == (
        f"vLLM {version} is refused: {why}. Nothing was patched; set KVOFFLOAD_STRICT=0 to serve "
        "without the CPU tier, or KVOFFLOAD_ALLOW_UNVERIFIED=1 to patch it all the same."
    )


def test_the_override_takes_the_next_minor_release_if_it_has_what_hooks_need(
    tmp_path: Path,
) -> None:
    sources = stubs(SNAPSHOTS[NEWEST], tmp_path)
    decision = decide(VLLM, POINTS, NEXT, sources, allow_unverified=True)
    assert [p.name for p in decision.points] == NAMES
    assert decision.doubts[0] == NOT_VERIFIED
    assert decision.doubts[1].endswith(f"is not what {NEWEST} has")  # they are stubs


OWN_BUILDS = ["cpu", "cu118", "cu126", "cu129", "cu130", "rocm700", "rocm7.0.0", "xpu", "tpu"]
OWN_BUILDS += ["precompiled", "cu129.precompiled", "empty"]


@pytest.mark.parametrize("local", OWN_BUILDS)
def test_builds_of_vllm_itself_are_the_release(local: str) -> None:
    assert VLLM.is_own_build(local) and not VLLM.is_own_build(f"{local}.mine")


def test_attributes_that_exist_in_no_release_are_not_listed() -> None:
    """Each row is selected by some release, and no name of a class stands in two rows of one."""
    for row in ATTRIBUTES:
        assert [r for r in SUPPORTED if r in SpecifierSet(row.versions)], row
    for release in SUPPORTED:
        now = [row for row in ATTRIBUTES if release in SpecifierSet(row.versions)]
        names = [(row.module, row.owner, name) for row in now for name in row.names]
        assert len(names) == len(set(names)), release


@pytest.mark.parametrize("release", [SUPPORTED[0], "0.17.0", NEWEST])
def test_every_attribute_that_is_listed_is_needed(release: str, tmp_path: Path) -> None:
    for place, names in SNAPSHOTS[release]["attributes"].items():
        rows = [r for r in ATTRIBUTES if f"{r.module}:{r.owner}" == place]
        now = {n for r in rows if release in SpecifierSet(r.versions) for n in r.names}
        owned = not place.endswith(":")  # names of a module are classes that have rows of their own
        for name in sorted(now & set((names or "").split()))[:2] if owned else ():
            taken = copy.deepcopy(SNAPSHOTS[release])
            taken["attributes"][place] = " ".join(set(names.split()) - {name})
            taken["targets"] = {
                target: None if target == f"{place}.{name}" else header
                for target, header in taken["targets"].items()
            }
            with pytest.raises(SignatureMismatch):
                decide(ANY_BODY, POINTS, release, stubs(taken, tmp_path / place / name))


def test_the_snapshots_of_neighbours_are_told_apart(tmp_path: Path) -> None:
    """The check is no formality: most changes of the table tell two releases apart."""
    refused = 0
    for older, newer in zip(SUPPORTED, SUPPORTED[1:]):
        sources = stubs(SNAPSHOTS[newer], tmp_path / newer)
        try:
            decided = decide(ANY_BODY, POINTS, older, sources)
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
STATUS = "vllm.v1.request:RequestStatus"
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
            "(self, throttle_prefills=...) -> SchedulerOutput",
            "(self, throttle_prefills=...) -> tuple[SchedulerOutput, int]",
        ),
        "scheduler.schedule returns 'tuple[SchedulerOutput, int]', expected 'SchedulerOutput'",
    ),
    (
        "a property",
        change(f"{POOL}.get_num_free_blocks", "(self) -> int", "property (self) -> int"),
        "pool.get_num_free_blocks is a property, expected a plain function",
    ),
    (
        "a static method",
        change(f"{POOL}.touch", "(self, blocks) -> None", "static (self, blocks) -> None"),
        "pool.touch is a static method, expected a plain function",
    ),
    (
        "a coroutine function",
        change(f"{POOL}.touch", "(self, blocks) -> None", "async (self, blocks) -> None"),
        "pool.touch is a coroutine function, expected a plain function",
    ),
    (
        "a new required parameter of a function that is called",
        change(
            "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks",
            "(self, request, max_cache_hit_length=...) -> tuple[KVCacheBlocks, int, int]",
            "(self, request, session, budget) -> tuple[KVCacheBlocks, int, int]",
        ),
        "manager.get_computed_blocks has the required parameter session, "
        "expected only (self, request)",
    ),
    (
        "a new required parameter of a function that is wrapped",
        change(
            f"{POOL}.get_new_blocks",
            "(self, num_blocks) -> list[KVCacheBlock]",
            "(self, num_blocks, *, owner) -> list[KVCacheBlock]",
        ),
        "pool.get_new_blocks has the required parameter owner, expected only (self, num_blocks)",
    ),
    (
        "any new parameter of a function that is stood in for",
        change(
            f"{POOL}.get_cached_block",
            "(self, block_hash, kv_cache_group_ids) -> list[KVCacheBlock] | None",
            "(self, block_hash, kv_cache_group_ids, touch=...) -> list[KVCacheBlock] | None",
        ),
        "pool.get_cached_block has the parameter touch, "
        "expected only (self, block_hash, kv_cache_group_ids)",
    ),
    (
        "an attribute has another name",
        lambda taken: taken["attributes"].update(
            {POOL: taken["attributes"][POOL].removeprefix("blocks ")}
        ),
        "BlockPool.blocks not found in vllm/v1/core/block_pool.py",
    ),
    (
        "an attribute is back",
        lambda taken: taken["attributes"].update(
            {STATUS: f"{taken['attributes'][STATUS]} WAITING_FOR_FSM"}
        ),
        "RequestStatus.WAITING_FOR_FSM exists, expected none",
    ),
]


@pytest.mark.parametrize(("apply", "found"), [c[1:] for c in CHANGED], ids=[c[0] for c in CHANGED])
def test_a_release_that_changed_is_refused_untouched(
    apply: Change, found: str, tmp_path: Path
) -> None:
    taken = copy.deepcopy(SNAPSHOTS[NEWEST])
    apply(taken)
    assert import_vllm(taken, NEWEST, tmp_path, KVOFFLOAD_ALLOW_UNVERIFIED="1") == [
        f"kvoffload_patch: vLLM {NEWEST} does not match the patch table: {found}. "
        "Nothing was patched; set KVOFFLOAD_STRICT=0 to serve without the CPU tier.",
        "imported: []",
    ]


def test_an_unknown_release_is_refused_untouched(tmp_path: Path) -> None:
    assert import_vllm(SNAPSHOTS[NEWEST], FAR, tmp_path) == [
        f"kvoffload_patch: vLLM {FAR} is not supported (supported: {SUPPORTED[0]} to {NEWEST}); "
        "install one of these, or set KVOFFLOAD_STRICT=0 to serve without the CPU tier.",
        "imported: []",
    ]


def test_bodies_of_no_release_are_refused_untouched(tmp_path: Path) -> None:
    refusal, imported = import_vllm(SNAPSHOTS[NEWEST], NEWEST, tmp_path)
    assert refusal.startswith(
        f"kvoffload_patch: vLLM {NEWEST} is refused: engine.init (EngineCore."
    )
    assert refusal.endswith("KVOFFLOAD_ALLOW_UNVERIFIED=1 to patch it all the same.")
    assert len(refusal) < 300 and imported == "imported: []"


def test_the_same_release_unchanged_is_armed_where_bodies_do_not_count(tmp_path: Path) -> None:
    """So the refusals above come of the change."""
    lines = import_vllm(SNAPSHOTS[NEWEST], NEWEST, tmp_path, KVOFFLOAD_ALLOW_UNVERIFIED="1")
    assert lines == ["vllm runs", "imported: ['vllm', 'wrapt']"]


def test_the_log_says_that_an_unverified_vllm_is_patched(tmp_path: Path) -> None:
    stubs(SNAPSHOTS[NEWEST], tmp_path)
    log = _import(NEXT, tmp_path, KVOFFLOAD_ALLOW_UNVERIFIED="1").stderr
    begin = "kvoffload_patch: KVOFFLOAD_ALLOW_UNVERIFIED patches a vLLM that was not verified: "
    assert log.startswith(begin + NOT_VERIFIED) and log.count("\n") == 1


def test_status_and_check_say_it_too(tmp_path: Path) -> None:
    stubs(SNAPSHOTS[NEWEST], tmp_path)
    _install(NEXT, tmp_path)
    allowed = {"KVOFFLOAD_ALLOW_UNVERIFIED": "1"}
    status = _run(["-m", "kvoffload_patch", "status"], tmp_path, **allowed).stdout
    assert f"unverified:   {NOT_VERIFIED}\n" in status and "verdict:      ok\n" in status
    done = _run(["-m", "kvoffload_patch", "--check"], tmp_path, **allowed)
    assert done.returncode == 0 and f"unverified: {NOT_VERIFIED}; " in done.stdout + done.stderr
    done = _run(["-m", "kvoffload_patch", "--check"], tmp_path)
    assert done.returncode == 2 and NOT_VERIFIED in done.stdout + done.stderr


def test_a_missing_module_is_named_and_its_points_are_counted(tmp_path: Path) -> None:
    taken = copy.deepcopy(SNAPSHOTS[NEWEST])
    taken["modules"]["vllm.v1.core.block_pool"] = False
    with pytest.raises(SignatureMismatch) as refusal:
        decide(ANY_BODY, POINTS, NEWEST, stubs(taken, tmp_path))
    text = str(refusal.value)
    assert "not found: there is no vllm/v1/core/block_pool.py (and " in text
    gone = [p for p in decided_for(NEWEST, tmp_path / "whole") if "block_pool" in p.module]
    classes = {a.owner for a in ATTRIBUTES if "block_pool" in a.module}
    assert f"(and {len(gone) - 1 + len(classes)} more)" in text  # the others, and attributes


def test_what_must_be_absent_is_complained_of_where_it_is(tmp_path: Path) -> None:
    taken = copy.deepcopy(SNAPSHOTS[SUPPORTED[0]])
    target = "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens"
    change(target, None, "(self, grammar_output) -> ModelRunnerOutput")(taken)
    with pytest.raises(SignatureMismatch) as refusal:
        decide(ANY_BODY, POINTS, SUPPORTED[0], stubs(taken, tmp_path))
    assert str(refusal.value) == (
        f"vLLM {SUPPORTED[0]} does not match the patch table: runner_v1.sample_tokens exists, "
        "expected none. Nothing was patched; "
        "set KVOFFLOAD_STRICT=0 to serve without the CPU tier."
    )


# --- The vLLM that is installed; its files are read, and it is not imported. ---

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


@needs_vllm
def test_the_files_that_are_installed_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no process of vLLM parses them, which takes half a second of each."""
    parsed: list[str] = []
    tree_of = Sources.tree
    monkeypatch.setattr(Sources, "tree", lambda self, m: parsed.append(m) or tree_of(self, m))
    decide(VLLM, POINTS, installed_version(VLLM))
    assert not parsed


@needs_vllm
def test_the_installed_release_matches() -> None:
    decision = decide(VLLM, POINTS, installed_version(VLLM))
    assert [p.name for p in decision.points] == NAMES


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    """The installed files, copied when they are looked for, so that they can be changed."""

    def find(module: str) -> Path:
        source = find_source(module)
        file = tmp_path / module / source.name
        if not file.exists():
            file.parent.mkdir()
            shutil.copy(source, file)
        return file

    return find


@needs_vllm
def test_a_changed_signature_is_named_and_the_others_are_counted(
    copied: Callable[[str], Path],
) -> None:
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
    assert ": scheduler.reset_prefix_cache returns 'int', expected 'bool' (and 1 more)." in text
    assert "\n" not in text and text.endswith(f"{VLLM.remedy}.")


@needs_vllm
def test_a_new_required_parameter_of_what_is_only_called_is_refused(
    copied: Callable[[str], Path],
) -> None:
    """Not hooked, but called by us, or stood in for, so that vLLM would call ours with it."""
    _replace(
        copied("vllm.v1.core.kv_cache_manager"),
        "def get_computed_blocks(self, request: Request)",
        "def get_computed_blocks(self, request: Request, session, budget)",
    )
    _replace(
        copied("vllm.v1.core.block_pool"),
        "self, block_hash: BlockHash, kv_cache_group_ids: list[int]\n",
        "self, block_hash: BlockHash, kv_cache_group_ids: list[int], touch: bool\n",
    )
    with pytest.raises(SignatureMismatch, match="has the .*parameter .*and 1 more") as refusal:
        decide(VLLM, POINTS, installed_version(VLLM), copied)
    assert "session" in str(refusal.value) or "touch" in str(refusal.value)


@needs_vllm
def test_the_installed_release_matches_also_where_files_are_compared(
    copied: Callable[[str], Path],
) -> None:
    file = copied("vllm.v1.core.block_pool")
    file.write_text(file.read_text() + "# remark\n")
    assert decide(VLLM, POINTS, installed_version(VLLM), copied).doubts == ()


BLOCKS_TAKEN = "        if num_blocks > self.get_num_free_blocks():"


@needs_vllm
def test_a_body_that_was_changed_is_refused_and_can_be_allowed(
    copied: Callable[[str], Path],
) -> None:
    _replace(copied("vllm.v1.core.block_pool"), BLOCKS_TAKEN, f"        raise 1\n{BLOCKS_TAKEN}")
    version = installed_version(VLLM)
    with pytest.raises(UnverifiedHost) as refusal:
        decide(VLLM, POINTS, version, copied)
    doubt = f"pool.get_new_blocks (BlockPool.get_new_blocks) is not what {release_of(version)} has"
    assert str(refusal.value).startswith(f"vLLM {version} is refused: {doubt}. ")
    assert decide(VLLM, POINTS, version, copied, allow_unverified=True).doubts == (doubt,)


def _replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, old
    file.write_text(text.replace(old, new))


# --- Stub modules from a snapshot. ---


def unsaid(taken: dict[str, Any]) -> str:
    """One sentence about what of the table a snapshot does not know, or ""."""
    targets = {p.target for p in POINTS} - set(taken["targets"])
    owners = {f"{row.module}:{row.owner}" for row in ATTRIBUTES} - set(taken["attributes"])
    missing = sorted(targets | owners)
    if not missing:
        return ""
    return (
        f"tests/data/vllm/{taken['release']}.json does not say what {' and '.join(missing)} "
        "looks like, which the table names; run python scripts/release snapshot --all."
    )


def stubs(taken: dict[str, Any], folder: Path) -> Callable[[str], Path]:
    """Write modules with what the snapshot has, and nothing else; give decide's `find_source`."""
    if unsaid(taken):
        raise AssertionError(unsaid(taken))
    texts = {
        module: module_text(taken, module)
        for module, is_there in taken["modules"].items()
        if is_there
    }

    def path(module: str) -> Path:
        file = folder.joinpath(*module.split("."))
        packaged = any(other.startswith(f"{module}.") for other in texts)
        return file / "__init__.py" if packaged else file.with_suffix(".py")

    for module, text in texts.items():
        path(module).parent.mkdir(parents=True, exist_ok=True)
        path(module).write_text(text)

    def find(module: str) -> Path:
        if module not in texts:
            raise FileNotFoundError(path(module))
        return path(module)

    return find


KINDS = {"property": "@property\n    def", "static": "@staticmethod\n    def"}
KINDS |= {"async": "async def", "": "def"}


def module_text(taken: dict[str, Any], module: str) -> str:
    """Source of a stub module; a header is "KIND (parameters) -> returns", or without the kind."""
    bodies: dict[str, list[str]] = {}
    for place, names in taken["attributes"].items():
        if place.startswith(f"{module}:") and names is not None:
            owner = place.partition(":")[2]
            own = [f"    {name}: object" for name in names.split()]
            bodies[owner] = [f"class {owner}:", "    ...", *own]
    for target, header in taken["targets"].items():
        if target.startswith(f"{module}:") and header is not None:
            owner, _, name = target.partition(":")[2].rpartition(".")
            kind, _, signature = header.partition("(")
            body = bodies.setdefault(owner, [f"class {owner}:"])
            body.append(f"    {KINDS[kind.strip()]} {name}({signature}: ...")
    at_top = [line.removeprefix("    ") for line in bodies.pop("", [])[1:]]
    classes = {f"class {name}:": body for name, body in bodies.items()}
    named = [line for line in at_top if f"class {line.partition(':')[0]}:" not in classes]
    return "\n".join([*named, *(line for body in classes.values() for line in body)]) + "\n"


def decided_for(release: str, folder: Path) -> tuple[PatchPoint, ...]:
    return decide(ANY_BODY, POINTS, release, stubs(SNAPSHOTS[release], folder)).points


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


def import_vllm(taken: dict[str, Any], release: str, folder: Path, **variables: str) -> list[str]:
    """What a process prints that imports a vLLM of this release with our start-up hook."""
    stubs(taken, folder)
    return _import(release, folder, **variables).stdout.splitlines()


def _import(release: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    _install(release, folder)
    done = _run(["-c", IMPORT], folder, KVOFFLOAD_ENABLE="1", **variables)
    assert done.returncode == 0, done.stderr
    return done


def _install(release: str, folder: Path) -> None:
    """Make the stubs an installed vLLM that says so when it runs."""
    (folder / "vllm" / "__init__.py").write_text("print('vllm runs')\n")
    info = folder / f"vllm-{release}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}\n")


def _run(arguments: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    others = {k: v for k, v in os.environ.items() if not k.startswith("KVOFFLOAD_")}
    env = {**others, **variables, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    return subprocess.run(
        [sys.executable, *arguments], env=env, cwd=folder, capture_output=True, text=True
    )
