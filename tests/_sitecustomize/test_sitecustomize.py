"""The folder on PYTHONPATH: it arms, brings our package alone along, and hides nobody's code."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from sandbox import Sandbox

STEP = "from vllm.engine import Engine; print(Engine().step())"


@pytest.fixture
def bare(tmp_path: Path) -> Sandbox:
    """The package without its start-up file, as on a plain PYTHONPATH."""
    return Sandbox(tmp_path / "bare", startup_file=False)


@pytest.fixture
def other(tmp_path: Path) -> Sandbox:
    """Another Python's environment, which has vLLM and nothing of ours."""
    box = Sandbox(tmp_path / "other", startup_file=False)
    shutil.rmtree(box.package)
    return box


def test_another_python_gets_our_package_and_nothing_beside_it(
    bare: Sandbox, other: Sandbox
) -> None:
    bare.write(bare.site / "neighbour.py", "")
    ours = str(bare.package / "_sitecustomize")
    code = f"""if 1:
        import importlib.util, sys
        import kvoffload_patch, kvoffload_patch.config
        print(kvoffload_patch.__file__, importlib.util.find_spec("neighbour"))
        print([p for p in sys.path if p.startswith({str(bare.root)!r})])
        importlib.reload(kvoffload_patch)
        {STEP}"""
    done = other.run("-c", code, PYTHONPATH=ours, KVOFFLOAD_ENABLE="1")
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout == f"{bare.package}/__init__.py None\n[]\npatched\n"


def test_a_python_without_our_requirements_refuses(bare: Sandbox, other: Sandbox) -> None:
    (other.site / "wrapt").unlink()
    ours = str(bare.package / "_sitecustomize")
    done = other.run("-c", STEP, PYTHONPATH=ours, KVOFFLOAD_ENABLE="1")
    assert (done.stdout, done.returncode) == ("", 2)
    assert done.stderr.splitlines()[0] == (
        "kvoffload_patch: the package or one of its requirements cannot be imported by"
        f" {other.python} (No module named 'wrapt'); reinstall kvoffload_patch with its"
        " dependencies there."
    )


def test_the_package_of_that_python_is_preferred(bare: Sandbox, tmp_path: Path) -> None:
    own = Sandbox(tmp_path / "own", startup_file=False)
    code = "import kvoffload_patch._bootstrap as b; print(b.__file__)"
    ours = str(bare.package / "_sitecustomize")
    done = own.run("-c", code, PYTHONPATH=ours, KVOFFLOAD_ENABLE="1")
    assert done.stdout == f"{own.package}/_bootstrap.py\n"


def test_off_imports_nothing_of_ours(bare: Sandbox) -> None:
    ours = str(bare.package / "_sitecustomize")
    code = "import sys; print([m for m in sys.modules if 'kvoffload' in m])"
    for off in ("", "0", " Off "):
        assert bare.run("-c", code, PYTHONPATH=ours, KVOFFLOAD_ENABLE=off).stdout == "[]\n"


USERS = "import sys; print('user', sys.modules['sitecustomize'].__file__ == __file__)\n"


@pytest.mark.parametrize(
    "users",
    [USERS, "1 / 0", "import nothing_like_it", "raise SystemExit(3)", "import sitecustomize as s"],
)
def test_shadowed_sitecustomize_behaves_as_without_us(bare: Sandbox, users: str) -> None:
    bare.write(bare.root / "mine/sitecustomize.py", users)
    mine, ours = str(bare.root / "mine"), str(bare.package / "_sitecustomize")
    code = "import sys; print(sys.modules.get('sitecustomize'), [p for p in sys.path if 'ne' in p])"
    alone = bare.run("-c", code, PYTHONPATH=mine)
    behind = bare.run("-c", code, PYTHONPATH=f"{ours}:{mine}", KVOFFLOAD_ENABLE="1")
    assert (behind.stdout, behind.returncode) == (alone.stdout, alone.returncode)
    said = [[li for li in run.stderr.splitlines() if li[:1] != " "] for run in (alone, behind)]
    assert said[0] == said[1]  # all but the frames of a traceback
    assert alone.stdout.startswith("user True\n") == (users == USERS)


def test_sitecustomize_alone_arms(bare: Sandbox) -> None:
    ours = str(bare.package / "_sitecustomize")
    assert bare.run("-c", STEP, PYTHONPATH=ours, KVOFFLOAD_ENABLE="1").stdout == "patched\n"
    for off in ("", "0", "no"):
        assert bare.run("-c", STEP, PYTHONPATH=ours, KVOFFLOAD_ENABLE=off).stdout == "plain\n"


THEIRS = """\
import importlib.util, os, sys
from importlib.machinery import PathFinder
print("theirs")
here = os.path.dirname(__file__)
if "remove" in os.environ["CHAIN"]:
    sys.path.remove(here)
spec = PathFinder.find_spec("sitecustomize", [p for p in sys.path if p != here])
if spec:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""


@pytest.mark.parametrize("chain", ["remove", "keep"])
def test_others_that_chain_load_too_do_not_loop(bare: Sandbox, chain: str) -> None:
    other = bare.write(bare.root / "other/sitecustomize.py", THEIRS).parent
    mine = bare.write(bare.root / "mine/sitecustomize.py", "print('mine')").parent
    ours = bare.package / "_sitecustomize"
    for path in (f"{ours}:{other}:{mine}", f"{other}:{ours}:{mine}"):
        done = bare.run("-c", "print(1)", PYTHONPATH=path, KVOFFLOAD_ENABLE="1", CHAIN=chain)
        assert (done.stdout, done.stderr) == ("theirs\nmine\n1\n", "")
