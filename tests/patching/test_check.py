"""The decision: versions, the table, and the comparison with source files."""

from __future__ import annotations

import dataclasses
import tokenize
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload_patch import patching
from kvoffload_patch.patching import (
    Host,
    PatchPoint,
    PatchTableError,
    SignatureMismatch,
    UnreadableVersion,
    UnsupportedVersion,
    decide,
    release_of,
)
from kvoffload_patch.patching.check import select
from kvoffload_patch.patching.sources import Sources

HOST = Host("Toy", ("toy",), "toy", ">=1.0,<1.4", "use toy 1.3")
POINT = PatchPoint(
    name="scheduler.step",
    module="toy.core",
    attribute="Engine.step",
    hook="hooks:step",
    versions=">=1.0,<1.4",
    parameters=("self", "request"),
    returns=("tuple[int, int]",),
    why="Test.",
)
SOURCE = "class Engine:\n    def step(self, request, more=1) -> tuple[int, int]: ...\n"


def change(**fields):
    return dataclasses.replace(POINT, **fields)


@pytest.fixture
def verify(tmp_path: Path):
    """Decide for version 1.2 with the given source text of the one module there is."""

    def run(source, *points, version="1.2", host=HOST, **more):
        file = tmp_path / "core.py"
        file.write_text(source)

        def find(module):
            if module != "toy.core":
                raise FileNotFoundError(module)
            return file

        return decide(host, points or (POINT,), version, find, **more)

    return run


def complaint(verify, source, *points) -> str:
    with pytest.raises(SignatureMismatch) as caught:
        verify(source, *points)
    return str(caught.value)


@pytest.mark.parametrize(
    "version",
    ["1.0", "1.3.9", "1.3rc1", "1.2.dev5+gabc", "1.3.9+cu118", "1.3.9.post2", "v1.1", "1.0a1"],
)
def test_pre_releases_and_local_versions_select_like_their_release(verify, version):
    decision = verify(SOURCE, version=version)
    assert decision.points == (POINT,)
    assert decision.version == version


@pytest.mark.parametrize("version", ["0.9", "1.4", "1.4rc1", "1.4.dev1", "2!1.2"])
def test_unsupported_version(verify, version):
    with pytest.raises(UnsupportedVersion) as caught:
        verify(SOURCE, version=version)
    expected = f"Toy {version} is not supported (supported: >=1.0,<1.4); install one of these, or"
    assert str(caught.value) == f"{expected} use toy 1.3."


def test_a_user_who_allows_everything_reads_how_far_that_reaches(verify):
    host = dataclasses.replace(HOST, override="ALLOW=1")
    with pytest.raises(UnsupportedVersion, match=r"\(supported: .*; ALLOW=1 reaches >=1.0,<1.4 o"):
        verify(SOURCE, version="1.4", host=host, allow_unverified=True)


@pytest.mark.parametrize("version", ["dev", "", "1.2-my-tree"])
def test_unreadable_version(verify, version):
    with pytest.raises(UnreadableVersion) as caught:
        verify(SOURCE, version=version)
    assert str(caught.value) == f"The version {version!r} of Toy cannot be read; use toy 1.3."


def test_ranges_select_by_version(verify):
    old = change(versions="<1.3", parameters=("self", "req"))
    new = change(versions=">=1.3")
    assert verify(SOURCE, old, new, version="1.3.0rc1").points == (new,)
    with pytest.raises(SignatureMismatch, match=r"expected \(self, req\)"):
        verify(SOURCE, old, new, version="1.2.9.post1")


def test_table_gap_overlap_and_shared_target(verify):
    gap = (change(versions="<1.1"), change(versions=">=1.2"))
    with pytest.raises(PatchTableError, match=r"release 1\.1, .*scheduler\.step is selected 0"):
        select(gap, release_of("1.1"))
    for release in ("1.0", "1.2", "1.2rc1"):
        assert len(select(gap, release_of(release))) == 1
    overlap = (change(versions="<=1.2"), change(versions=">=1.2"))
    with pytest.raises(PatchTableError, match=r"scheduler\.step is selected 2 times"):
        verify(SOURCE, *overlap)
    with pytest.raises(PatchTableError, match=r"toy\.core:Engine\.step has 2 points"):
        verify(SOURCE, POINT, change(name="another"))


@settings(deadline=None)  # a machine may be busy
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True), st.integers(0, 9))
def test_adjacent_ranges_cover_every_release_exactly_once(cuts, minor):
    bounds = sorted(cuts)
    edges = [f"<1.{bounds[0]}"]
    edges += [f">=1.{a},<1.{b}" for a, b in zip(bounds, bounds[1:])]
    edges += [f">=1.{bounds[-1]}"]
    table = [change(versions=edge) for edge in edges]
    for release in (f"1.{minor}", f"1.{minor}rc1", f"1.{minor}.post1+local"):
        assert len(select(table, release_of(release))) == 1
    with pytest.raises(PatchTableError):
        select([*table, change(versions=f"==1.{minor}")], release_of(f"1.{minor}"))


@pytest.mark.parametrize(
    "fields",
    [
        {"versions": "about 1.2"},
        {"hook": "hooks.step"},
        {"returns": ("tuple[int",)},
    ],
)
def test_unreadable_point(fields):
    with pytest.raises(PatchTableError, match=r"^Patch point scheduler\.step: .*\.$"):
        change(**fields)


@pytest.mark.parametrize(
    "source",
    [
        SOURCE,
        SOURCE.replace("tuple[int, int]", "'tuple[int,int]'"),
        SOURCE.replace("more=1", "*args, more=1, **kwargs"),
        "try:\n    import x\nexcept ImportError:\n" + "    " + SOURCE.replace("\n    ", "\n      "),
        SOURCE.replace("    def", "    @overload\n    def step(self): ...\n    def"),
        "class Base:" + SOURCE[len("class Engine:") :] + "class Engine(Base): pass\n",
    ],
)
def test_source_that_matches(verify, source):
    assert verify(source).points == (POINT,)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("", "not found in toy/core.py"),
        ("class Engine: pass", "not found in toy/core.py"),
        ("def step(self, request): ...", "not found in toy/core.py"),
        ("class Engine(Engine): pass", "not found in toy/core.py"),
        ("class Engine:\n    class step: ...", "not found in toy/core.py"),
        ("class Engine(", "not found: toy/core.py cannot be parsed"),
        ("class Engine:\n    @property\n" + SOURCE[14:], "is a property"),
        (SOURCE.replace("def", "@cached_property\n    def"), "is a property"),
        (SOURCE.replace("def", "@staticmethod\n    def"), "is a static method"),
        (SOURCE.replace("def", "@classmethod\n    def"), "is a class method"),
        (SOURCE.replace("def", "async def"), "is a coroutine function"),
        (SOURCE.replace("request", "request, /"), "takes (self, request, more)"),
        (SOURCE.replace("request", "*, request"), "takes (self, request, more)"),
        (SOURCE.replace("more=1", "more"), "has the required parameter more"),
        (SOURCE.replace("more=1", "*, a=1, more"), "has the required parameter more"),
        (
            SOURCE.replace("request", "batch, request"),
            "takes (self, batch, request, more), expected (self, request)",
        ),
        (SOURCE.replace("request, more=1", ""), "takes (self), expected (self, request)"),
        (SOURCE.replace(", int]", "]"), "returns 'tuple[int]', expected 'tuple[int, int]'"),
        (SOURCE.replace("tuple[int, int]", "'A'"), "returns 'A', expected 'tuple[int, int]'"),
        (SOURCE.replace(" -> tuple[int, int]", ""), "returns '', expected 'tuple[int, int]'"),
        (
            "class Engine:\n    def step(self) -> Literal['a b']: ...",
            "takes (self), expected (self, request) and "
            "returns 'Literal['a b']', expected 'tuple[int, int]'",
        ),
    ],
)
def test_source_that_does_not_match(verify, source, expected):
    text = complaint(verify, source)
    assert text.startswith(f"Toy 1.2 does not match the patch table: scheduler.step {expected}")
    assert text.endswith(". Nothing was patched; use toy 1.3.")


def test_several_accepted_return_annotations(verify):
    both = change(returns=("int", "tuple[int, int]"))
    assert verify(SOURCE, both).points == (both,)
    none = change(returns=("", "int"))
    assert verify("class Engine:\n    def step(self, request): ...", none).points == (none,)
    assert "expected '' or 'int'" in complaint(verify, SOURCE, none)


def test_the_first_mismatch_is_named_and_the_others_are_counted(verify):
    points = (
        change(name="a", attribute="Engine.gone"),
        POINT,
        change(name="b", module="toy.absent", attribute="f"),
        change(name="c", attribute="Engine.start", returns=("str",)),
    )
    text = complaint(verify, SOURCE + "    def start(self, request) -> int: ...\n", *points)
    assert text == (
        "Toy 1.2 does not match the patch table: a not found in toy/core.py (and 2 more). "
        "Nothing was patched; use toy 1.3."
    )


def test_a_missing_module_is_named(verify):
    text = complaint(verify, SOURCE, change(name="b", module="toy.absent", attribute="f"))
    assert "b not found: there is no toy/absent.py." in text


def test_a_target_that_is_stood_in_for_has_no_parameter_besides(verify):
    exact = change(exact=True)
    assert verify(SOURCE.replace(", more=1", ""), exact).points == (exact,)
    assert "has the parameter more, expected only (self, request)" in complaint(
        verify, SOURCE, exact
    )


def test_deciding_reads_each_file_once(host):
    # Reading a large file is what deciding takes: vLLM's scheduler has thousands of lines.
    output = host.run(
        """
        import ast
        read, parse = [], ast.parse
        def counted(source, *args, **more):
            if isinstance(source, bytes):  # a file; else an annotation
                read.append(source)
            return parse(source, *args, **more)
        ast.parse = counted
        points = (STEP, EXECUTE, INHERITED, MAKE)
        decide(HOST, points, installed_version(HOST))
        print(len(read), len(set(read)), len({p.module for p in points}), len(points))
        """
    )
    read, files, modules, points = map(int, output.split())
    assert read == files == modules < points


def test_refused_decision_leaves_the_process_alone(host):
    host.set_version("2.0.0")
    host.run(
        """
        finders = list(sys.meta_path)
        text = refused(UnsupportedVersion, patches)
        assert text == (
            "FakeHost 2.0.0 is not supported (supported: >=1.0,<2); install one of these, or use"
            " 1.x."
        )
        assert sys.meta_path == finders
        alpha = load("fakehost.alpha")
        assert vars(alpha.Engine)["step"] is alpha.ORIGINALS["step"]
        """
    )


def test_machinery_does_not_name_a_host():
    files = list(Path(patching.__file__).parent.glob("*.py"))
    assert len(files) == 11
    for file in files:
        with tokenize.open(file) as stream:
            assert "vllm" not in stream.read().lower(), file


ABSENT = change(name="engine.walk", attribute="Engine.walk", hook="", returns=None, absent=True)


def test_a_target_that_must_be_absent_may_be_absent(verify):
    assert verify(SOURCE, POINT, ABSENT).wrapped == (POINT,)


def test_its_whole_module_may_be_absent(verify):
    assert verify(SOURCE, POINT, dataclasses.replace(ABSENT, module="toy.other"))


@pytest.mark.parametrize("where", ["Engine", "Base"])
def test_a_target_that_must_be_absent_and_is_there_is_refused(verify, where):
    source = f"class Base: ...\n{SOURCE.replace('Engine:', 'Engine(Base):')}"
    source = source.replace("class Base: ...", "class Base:\n    def up(self): ...\n")
    source += "    def walk(self): ...\n"
    if where == "Base":
        source = source.replace("    def walk(self): ...\n", "")
        source = source.replace("def up(self)", "def walk(self)")
    text = complaint(verify, source, POINT, ABSENT)
    assert "engine.walk exists, expected none" in text


def test_an_absent_target_has_no_hook():
    with pytest.raises(PatchTableError, match="target is absent"):
        change(absent=True)


@pytest.fixture
def found(tmp_path: Path):
    """Attributes of `Engine` in toy.core, of so many modules."""

    def run(**modules):
        files = {f"toy.{name}": tmp_path / f"{name}.py" for name in modules}
        for name, text in modules.items():
            files[f"toy.{name}"].write_text(text)

        def find(module):
            if module not in files:
                raise FileNotFoundError(module)
            return files[module]

        return Sources(find).attributes("toy.core", "Engine")

    return run


def test_attributes_are_found_through_imports_and_base_classes(found):
    core = "from toy.a import Base as Up\nclass Engine(Up): own = 1\n"
    assert found(core=core, a="from toy.b import Base\n", b="class Base: up = 2\n") == {"own", "up"}


def test_classes_and_imports_that_go_in_a_circle_end(found):
    core = "from toy.a import Base\nclass Engine(Base): own = 1\n"
    round_about = "from toy.core import Engine\nclass Base(Engine): up = 2\n"
    assert found(core=core, a=round_about) == {"own", "up"}
    assert found(core=core, a="from toy.b import Base\n", b="from toy.a import Base\n") == {"own"}
    assert found(core="from toy.a import Engine\n", a="from toy.core import Engine\n") is None
    assert found(core="from toy.absent import Engine\n") is None


@pytest.mark.parametrize(
    ("later", "said"),
    [
        ("Engine.step = other", "Engine.step = other"),
        ("if True:\n    Engine.step: object = other", "Engine.step: object = other"),
        ("for Engine.step in (other,): pass", "for Engine.step in (other,):"),
        ("del Engine.step", "del Engine.step"),
        ("setattr(Engine, 'step', other)", "setattr(Engine, 'step', other)"),
        ("    step = other", "step = other"),
        ("    more = step = other", "more = step = other"),
        ("    from others import that as step", "from others import that as step"),
        ("    try: pass\n    finally: step = other", "step = other"),
    ],
)
def test_a_definition_that_is_replaced_later_in_its_source_is_refused(verify, later, said):
    text = complaint(verify, SOURCE + later + "\n")
    assert f"scheduler.step may be replaced by '{said}' in toy/core.py, expected nothing." in text


def test_a_class_behind_a_decorator_is_refused_unless_that_replaces_no_method(verify):
    text = complaint(verify, f"@others.changed(1)\n{SOURCE}")
    assert "scheduler.step may be replaced by '@others.changed(1)' in toy/core.py" in text
    for decorator in ("dataclass", "dataclasses.dataclass", "dataclass(slots=True)"):
        assert verify(f"@{decorator}\n{SOURCE}").points == (POINT,)


def test_a_function_of_a_module_that_is_replaced_later_is_refused(verify):
    function = "def step(self, request) -> tuple[int, int]: ...\n"
    alone = change(attribute="step")
    assert verify(f"step = None\n{function}", alone).points == (alone,)
    assert "replaced by 'step = other'" in complaint(verify, f"{function}step = other\n", alone)


@pytest.mark.parametrize(
    "beside",
    [
        "Engine.other = step",
        "Other.step = 1",
        "def f():\n    Engine.step = 1",
        "    def g(self): step = 1",
        "x = Engine.step",
    ],
)
def test_what_gives_a_value_to_another_name_is_none_of_a_points(verify, beside):
    assert verify(f"{SOURCE}{beside}\n").points == (POINT,)
