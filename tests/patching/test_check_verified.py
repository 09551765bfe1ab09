"""Releases, bodies and attributes: what was verified, and what the user's override may forgive."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from kvoffload_patch.patching import (
    Attributes,
    Host,
    PatchPoint,
    Records,
    SignatureMismatch,
    UnsupportedVersion,
    UnverifiedHost,
    decide,
    digest,
)
from kvoffload_patch.patching import check as check_module
from kvoffload_patch.patching.check import bodies, fingerprint
from kvoffload_patch.patching.sources import Sources

POINT = PatchPoint(
    name="scheduler.step",
    module="toy.core",
    attribute="Engine.step",
    hook="hooks:step",
    versions=">=1.0",
    parameters=("self", "request"),
    returns=None,
    why="Test.",
)
ATTRIBUTES = (
    Attributes("toy.core", "Engine", ("queue", "limit"), ">=1.0"),
    Attributes("toy.core", "Engine", ("later",), ">=1.5"),
)
FILES = {
    "toy.core": '''
from .base import Common as _Common
class Engine(_Common):
    limit: int
    def __init__(self):
        self.queue = []
    def step(self, request):
        """Words."""
        self.queue.append(request)  # remarks
''',
    "toy.base": "class Common:\n    pass\n",
}
HOST = Host(
    name="Toy",
    distributions=("toy",),
    package="toy",
    supported=">=1.0,<1.9",
    remedy="use toy 1.2",
    attributes=ATTRIBUTES,
    own_builds=r"cpu|cu\d+",
    override="set TOY=1",
)


class Tree:
    """The host's files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.looked_for: list[str] = []
        for module, text in FILES.items():
            self.write(module, text)
        self.host = dataclasses.replace(HOST, records=self.records("1.0", "1.2"))

    def write(self, module: str, text: str) -> None:
        (self.folder / f"{module}.py").write_text(text)

    def replace(self, module: str, old: str, new: str) -> None:
        assert old in FILES[module]
        self.write(module, FILES[module].replace(old, new))

    def find(self, module: str) -> Path:
        self.looked_for.append(module)
        file = self.folder / f"{module}.py"
        if not file.exists():
            raise FileNotFoundError(module)
        return file

    def records(self, *releases: str) -> Records:
        sources = Sources(self.find)
        found = bodies([POINT], sources)
        sources.attributes("toy.core", "Engine")
        files = {m: digest.of_file(content) for m, content in sources.contents.items()}
        since = releases[0]
        return Records(
            releases=releases,
            table=fingerprint(HOST, [POINT]),
            bodies={name: {since: text} for name, text in found.items()},
            files={name: {since: text} for name, text in files.items()},
        )

    def decide(self, version="1.2", host=None, **options):
        self.looked_for.clear()
        return decide(host or self.host, [POINT], version, self.find, **options)

    def refusal(self, kind, version="1.2", **options) -> str:
        with pytest.raises(kind) as caught:
            self.decide(version, **options)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 250
        return str(caught.value)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.mark.parametrize("version", ["1.0", "1.2", "1.2.post1", "1.2+cpu", "1.2.post1+cu129"])
def test_a_verified_release_and_its_own_builds_have_no_doubts(tree, version):
    assert tree.decide(version).doubts == ()


@pytest.mark.parametrize(
    "version", ["1.1", "1.2.1", "1.2rc1", "1.2.dev3+gabc", "1.2.1.dev3+gabc.cu129", "1.3+cpu"]
)
def test_another_release_is_refused_before_a_file_is_looked_for(tree, version):
    assert tree.refusal(UnverifiedHost, version) == (
        f"Toy {version} is refused: this release is not one of those verified (1.0 to 1.2). "
        "Nothing was patched; use toy 1.2, or set TOY=1 to patch it all the same."
    )
    assert tree.looked_for == []


@pytest.mark.parametrize("version", ["1.2+fork", "1.2+cpu.mine", "1.2+9114fd76.nv25.10"])
def test_a_fork_is_refused(tree, version):
    local = version.partition("+")[2]
    text = tree.refusal(UnverifiedHost, version)
    assert text.startswith(f"Toy {version} is refused: '+{local}' is not a build of Toy's own. ")


@pytest.mark.parametrize("version", ["1.1", "1.2rc1", "1.2+fork", "1.4"])
def test_the_override_forgives_the_version(tree, version):
    decision = tree.decide(version, allow_unverified=True)
    assert decision.points == (POINT,) and len(decision.doubts) == 1


@pytest.mark.parametrize("version", ["0.9", "1.9", "2.0"])
def test_the_override_does_not_forgive_a_release_out_of_bounds(tree, version):
    assert "supported: 1.0 to 1.2" in tree.refusal(
        UnsupportedVersion, version, allow_unverified=True
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.queue.append(request)", "raise NotImplementedError"),
        ("self.queue.append(request)", "self.queue.append(request or 0)"),
        ("request):", "request, more=1):"),
        ("    def step", "    @traced\n    def step"),
    ],
)
def test_a_changed_body_is_refused_and_can_be_forgiven(tree, old, new):
    tree.replace("toy.core", old, new)
    doubt = "scheduler.step (Engine.step) is not what 1.2 has"
    assert tree.refusal(UnverifiedHost) == (
        f"Toy 1.2 is refused: {doubt}. "
        "Nothing was patched; use toy 1.2, or set TOY=1 to patch it all the same."
    )
    assert tree.decide(allow_unverified=True).doubts == (doubt,)


def test_doubts_of_an_unverified_release_name_what_differs_from_the_nearest(tree):
    tree.replace("toy.core", "self.queue.append(request)", "pass")
    doubts = tree.decide("1.3", allow_unverified=True).doubts
    assert [text.partition(" ")[0] for text in doubts] == ["this", "scheduler.step"]
    assert doubts[1].endswith("is not what 1.2 has")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('        """Words."""\n', '        """Others,\n\n        and more."""\n'),
        ("  # remarks", ""),
        ("(request)  #", "(\n            request\n        )  #"),
        ("limit: int", "limit: int = 3"),
    ],
)
def test_words_remarks_and_formatting_do_not_count(tree, old, new):
    tree.replace("toy.core", old, new)
    assert tree.decide().doubts == ()


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("self.queue = []", "self.waiting = []", "Engine.queue not found in toy/core.py"),
        ("limit: int", "bound: int", "Engine.limit not found in toy/core.py"),
        ("limit: int", "limit: int; later = 1", "Engine.later exists, expected none"),
        ("class Engine", "class Motor", "scheduler.step not found in toy/core.py (and 1 more)"),
        ("def step", "def walk", "scheduler.step not found in toy/core.py"),
        ("request):", "batch):", "takes (self, batch), expected (self, request)"),
        ("request):", "request, more):", "has the required parameter more"),
    ],
)
def test_what_hooks_need_is_never_forgiven(tree, old, new, found, allowed):
    tree.replace("toy.core", old, new)
    assert found in tree.refusal(SignatureMismatch, allow_unverified=allowed)


@pytest.mark.parametrize(
    "text",
    [
        "class Common:\n    queue = None",
        "class Common:\n    queue: list",
        "class Common:\n    @property\n    def queue(self): ...",
        "class Common:\n    def reset(this):\n        this.queue, this.a = [], 1",
        "if 1:\n    class Common:\n        if 1:\n            queue = 1",
        "class Common(Deeper): ...\nclass Deeper:\n    def f(self):\n        self.queue: list = []",
        "from toy.more import Common",
        "try:\n    from toy.more import Other as Common\nexcept ImportError: pass",
    ],
)
def test_an_attribute_may_come_from_a_base_class_of_any_module(tree, text):
    tree.replace("toy.core", "self.queue = []", "pass")
    tree.write("toy.base", text)
    tree.write("toy.more", "class Common:\n    queue = 1\nclass Other(Common[int]): ...")
    tree.refusal(UnverifiedHost) if "step" in text else tree.decide()


def test_another_objects_attribute_is_not_the_classs_own(tree):
    tree.replace("toy.core", "self.queue = []", "request.queue = self.queue")
    assert "Engine.queue not found" in tree.refusal(SignatureMismatch)


def test_a_class_that_is_not_there_is_named(tree):
    rows = (*ATTRIBUTES, Attributes("toy.core", "Gone", ("a",), ">=1.0"))
    host = dataclasses.replace(tree.host, attributes=rows)
    assert "Gone not found in toy/core.py" in tree.refusal(SignatureMismatch, host=host)
    rows = (*ATTRIBUTES, Attributes("toy.gone", "Engine", ("a",), ">=1.0"))
    host = dataclasses.replace(tree.host, attributes=rows)
    assert "Engine not found in toy/gone.py" in tree.refusal(SignatureMismatch, host=host)


def test_names_of_a_module(tree):
    rows = (*ATTRIBUTES, Attributes("toy.core", "", ("Engine", "_Common"), ">=1.0"))
    tree.decide(host=dataclasses.replace(tree.host, attributes=rows))
    rows = (*ATTRIBUTES, Attributes("toy.core", "", ("Common",), ">=1.0"))
    host = dataclasses.replace(tree.host, attributes=rows)
    assert "toy.core.Common not found" in tree.refusal(SignatureMismatch, host=host)


# --- Files that are known need not be parsed. ---


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    tree_of = Sources.tree
    monkeypatch.setattr(Sources, "tree", lambda self, m: found.append(m) or tree_of(self, m))
    return found


def test_files_that_are_known_are_not_parsed(tree, parsed):
    assert tree.decide().points == (POINT,) and parsed == []
    tree.write("toy.base", FILES["toy.base"] + "# remark\n")
    assert tree.decide().points == (POINT,) and parsed


def test_after_a_change_of_the_table_they_are(tree, parsed):
    other = dataclasses.replace(POINT, parameters=("self", "batch"))
    with pytest.raises(SignatureMismatch, match=r"expected \(self, batch\)"):
        decide(tree.host, [other], "1.2", tree.find)
    parsed.clear()
    rows = (*ATTRIBUTES, Attributes("toy.core", "Engine", ("more",), ">=1.0"))
    tree.refusal(SignatureMismatch, host=dataclasses.replace(tree.host, attributes=rows))
    assert parsed


def test_a_file_that_appeared_is_seen(tree, parsed):
    tree.write("toy.new", "")
    files = {**tree.host.records.files, "toy.new": {"1.0": digest.ABSENT}}
    records = dataclasses.replace(tree.host.records, files=files)
    host = dataclasses.replace(tree.host, records=records)
    tree.decide(host=host)
    assert parsed
    parsed.clear()
    (tree.folder / "toy.new.py").unlink()
    tree.decide(host=host)
    assert parsed == []


# --- The data file. ---


def test_a_digest_holds_until_the_next(tmp_path):
    file = tmp_path / "records.json"
    bodies_since = {
        "a": {"1.0": "x", "1.10": "y z"},
        "b": {"1.2": "b"},
        "c": {"1.0": "c", "1.2": ""},
    }
    kept = {"releases": ["1.0", "1.2", "1.10"], "table": "t", "bodies": bodies_since, "files": {}}
    file.write_text(json.dumps(kept))
    records = Records.load(file)
    assert records.bodies_of("1.0") == {"a": {"x"}, "c": {"c"}}
    assert records.bodies_of("1.2") == {"a": {"x"}, "b": {"b"}}
    assert records.bodies_of("1.10") == {"a": {"y", "z"}, "b": {"b"}}
    nearest = {v: records.nearest(check_module.release_of(v)) for v in ("0.9", "1.1", "1.9", "3.0")}
    assert nearest == {"0.9": "1.0", "1.1": "1.0", "1.9": "1.2", "3.0": "1.10"}


def test_either_of_two_builds_is_the_release(tree):
    known = next(iter(tree.host.records.bodies["toy.core:Engine.step"].values()))
    both = {"toy.core:Engine.step": {"1.0": f"0123456789abcdef {known}"}}
    records = dataclasses.replace(tree.host.records, bodies=both, files={})
    assert tree.decide(host=dataclasses.replace(tree.host, records=records)).doubts == ()


def test_base_classes_of_other_packages_are_not_looked_for(tree):
    tree.write("other.base", FILES["toy.base"])
    tree.replace("toy.core", "from .base import", "from other.base import")
    records = tree.records("1.2")
    assert set(records.files) == {"toy.core"} and "other.base" not in tree.looked_for
