"""The start-up file, the import hook and the plugin entry point, each in real interpreters."""

from __future__ import annotations

import ast
import shutil
import subprocess
import time
import timeit
from collections.abc import Callable
from pathlib import Path

import pytest
from sandbox import REFUSAL, ROOT, Sandbox, imported

from kvoffload_patch.config import FALSE

OURS = "import sys; print(sorted(m for m in sys.modules if 'kvoffload' in m or m == 'wrapt'))"
STEP = "from vllm.engine import Engine, ORIGINAL; print(Engine().step(), Engine.step is ORIGINAL)"
PATCHED, PLAIN = "patched False\n", "plain True\n"
SENTENCE = f"kvoffload_patch: {REFUSAL}"


@pytest.fixture
def box(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path / "box")


@pytest.mark.parametrize("flag", ["", "FALSE", " Off ", *FALSE])
def test_off_imports_nothing_of_ours(box: Sandbox, flag: str) -> None:
    done = box.run("-X", "importtime", "-c", OURS, KVOFFLOAD_ENABLE=flag)
    assert done.stdout == "[]\n"
    seen = imported(done.stderr)
    assert "site" in seen and not [m for m in seen if "kvoffload" in m or "wrapt" in m]
    assert box.run("-c", STEP, KVOFFLOAD_ENABLE=flag).stdout == PLAIN
    assert box.armed() == []


def test_off_without_the_variable(box: Sandbox) -> None:
    assert box.run("-c", OURS).stdout == "[]\n"
    assert box.run("-c", STEP).stdout == PLAIN


def test_off_costs_less_than_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVOFFLOAD_ENABLE", "0")
    line = compile((ROOT / "kvoffload_patch.pth").read_text(), "pth", "exec")
    run = timeit.Timer(lambda: exec(line, {}), timer=time.thread_time)
    assert min(run.repeat(5, number=200)) / 200 < 0.001


def test_startup_file_is_one_import_line() -> None:
    (line,) = (ROOT / "kvoffload_patch.pth").read_text().splitlines()
    assert line.startswith("import ")


def test_on_adds_only_the_finder_until_vllm_is_imported(box: Sandbox) -> None:
    off = imported(box.run("-X", "importtime", "-c", "pass").stderr)
    on = imported(box.run("-X", "importtime", "-c", "pass", KVOFFLOAD_ENABLE="1").stderr)
    assert on - off - {"__future__"} == {"kvoffload_patch", "kvoffload_patch._bootstrap"}
    assert box.armed() == []


@pytest.mark.parametrize("flag", ["1", "true", "YES", "on"])
def test_on_arms_once_when_vllm_is_imported(box: Sandbox, flag: str) -> None:
    done = box.run("-c", STEP, KVOFFLOAD_ENABLE=flag)
    assert (done.stdout, done.stderr) == (PATCHED, "")
    assert len(box.armed()) == 1


def test_wrong_flag_refuses_the_import_and_nothing_else(box: Sandbox) -> None:
    assert box.run("-c", "print(1)", KVOFFLOAD_ENABLE="maybe").stderr == ""
    done = box.run("-c", STEP, KVOFFLOAD_ENABLE="maybe")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvoffload_patch: KVOFFLOAD_ENABLE is 'maybe', expected one of 1")


def test_startup_file_may_run_twice(box: Sandbox) -> None:
    code = f"""if 1:
        import site, sys
        site.addsitedir({str(box.site)!r}, set())
        from kvoffload_patch._bootstrap import VLLMFinder, main
        main()
        print(sum(isinstance(f, VLLMFinder) for f in sys.meta_path))"""
    assert box.run("-c", f"{code}\n{STEP}", KVOFFLOAD_ENABLE="1").stdout == "1\n" + PATCHED
    assert len(box.armed()) == 1


def _without_package(box: Sandbox, _: Path) -> dict[str, str]:
    shutil.rmtree(box.package)
    return {}


def _damaged_package(box: Sandbox, _: Path) -> dict[str, str]:
    (box.package / "_bootstrap.py").write_text("def main(:\n")
    return {}


def _damaged_package_of_another_python(box: Sandbox, folder: Path) -> dict[str, str]:
    other = Sandbox(folder / "other", startup_file=False)
    _damaged_package(other, folder)
    (box.site / "kvoffload_patch.pth").unlink()
    shutil.rmtree(box.package)
    return {"PYTHONPATH": str(other.package / "_sitecustomize")}


def _damaged_configuration(box: Sandbox, _: Path) -> dict[str, str]:
    (box.package / "config.py").write_text("def main(:\n")
    return {}


DAMAGE = [
    _without_package,
    _damaged_package,
    _damaged_package_of_another_python,
    _damaged_configuration,
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_broken_package_refuses_the_import_and_nothing_else(
    box: Sandbox, tmp_path: Path, damage: Callable[[Sandbox, Path], dict[str, str]]
) -> None:
    on = {"KVOFFLOAD_ENABLE": "1", **damage(box, tmp_path)}
    looks = "import importlib.util; print(importlib.util.find_spec('vllm').origin)"
    done = box.run("-c", looks, **on)
    assert (done.stdout, done.stderr) == (f"{box.site}/vllm/__init__.py\n", "")
    strict = box.run("-c", STEP, **on)
    assert strict.stdout == "" and strict.returncode in (1, 2)  # by the start-up file, by us
    sentence = strict.stderr[strict.stderr.rindex("kvoffload_patch: the package ") :].rstrip("\n")
    assert f"cannot be imported by {box.python} (" in sentence and "; reinstall " in sentence
    plain = box.run("-c", STEP, KVOFFLOAD_STRICT="0", **on)
    assert (plain.stdout, plain.returncode) == (PLAIN, 0)
    assert plain.stderr == f"{sentence} vLLM runs without the CPU tier.\n"
    for off in ({"KVOFFLOAD_ENABLE": " Off "}, {"KVOFFLOAD_DISABLE": "1"}):
        done = box.run("-c", STEP, **{**on, **off})
        assert (done.stdout, done.stderr) == (PLAIN, "")


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_broken_package_without_vllm_disturbs_nothing(
    tmp_path: Path, damage: Callable[[Sandbox, Path], dict[str, str]]
) -> None:
    box = Sandbox(tmp_path / "box", vllm=False)
    on = {"KVOFFLOAD_ENABLE": "1", **damage(box, tmp_path)}
    done = box.run("-c", "import vllm", **on)
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'vllm'"


def test_the_line_without_the_package_may_run_twice(box: Sandbox) -> None:
    shutil.rmtree(box.package)
    code = f"import site; site.addsitedir({str(box.site)!r}, set()); {STEP}"
    done = box.run("-c", code, KVOFFLOAD_ENABLE="1", KVOFFLOAD_STRICT="0")
    assert (done.stdout, len(done.stderr.splitlines())) == (PLAIN, 1)


def test_asking_whether_vllm_is_there_does_not_arm(box: Sandbox) -> None:
    code = """if 1:
        import importlib.util
        spec = importlib.util.find_spec("vllm")
        print(spec.origin.endswith("vllm/__init__.py"), spec.loader.get_filename() == spec.origin)
        """
    done = box.run("-c", code, KVOFFLOAD_ENABLE="1", FAKE_ARM="refuse")
    assert (done.stdout, done.stderr) == ("True True\n", "")
    assert box.armed() == []


def test_imported_vllm_shows_no_trace_of_the_loader(box: Sandbox) -> None:
    code = """if 1:
        import vllm, importlib
        print(type(vllm.__loader__).__name__, vllm.__spec__.loader is vllm.__loader__)
        importlib.reload(vllm)
        print(type(vllm.__loader__).__name__)"""
    done = box.run("-c", code, KVOFFLOAD_ENABLE="1")
    assert done.stdout == "SourceFileLoader True\nSourceFileLoader\n"
    assert len(box.armed()) == 1


@pytest.mark.parametrize("folder", [False, True])
def test_without_vllm_nothing_is_disturbed(tmp_path: Path, folder: bool) -> None:
    box = Sandbox(tmp_path / "box", vllm=False)
    if folder:  # such as the parent of a source tree: a namespace, not an installed vLLM
        (box.site / "vllm").mkdir()
    code = "import vllm.engine"
    runs = [box.run("-c", code, KVOFFLOAD_ENABLE=flag, FAKE_ARM="refuse") for flag in "10"]
    assert "ModuleNotFoundError: No module named 'vllm" in runs[0].stderr
    assert runs[0].stderr == runs[1].stderr
    assert box.armed() == []


def test_refusal_leaves_other_processes_alone(box: Sandbox) -> None:
    done = box.run("-c", "print('pip')", KVOFFLOAD_ENABLE="1", FAKE_ARM="refuse")
    assert (done.stdout, done.stderr, done.returncode) == ("pip\n", "", 0)


def test_refusal_is_said_once_and_sticks(box: Sandbox) -> None:
    code = """if 1:
        import sys
        for module in ("vllm", "vllm.engine", "vllm"):
            try:
                __import__(module)
            except ImportError as error:
                print(error, error.name, [m for m in sys.modules if m.startswith("vllm")])
        import vllm"""
    done = box.run("-c", code, KVOFFLOAD_ENABLE="1", FAKE_ARM="refuse")
    assert done.stdout == f"{SENTENCE} vllm []\n" * 3
    assert (done.returncode, done.stderr) == (2, SENTENCE + "\n")
    assert len(box.armed()) == 1


@pytest.mark.parametrize("prompt", [False, True])
def test_other_errors_and_prompts_show_what_they_always_do(box: Sandbox, prompt: bool) -> None:
    code = """if 1:
        import sys
        sys.excepthook = lambda kind, error, at: print("hook", kind.__name__)
        try:
            import vllm
        except ImportError:
            pass
        """
    code += "sys.ps1 = '>>> '; import vllm" if prompt else "raise KeyError"
    done = box.run("-c", code, KVOFFLOAD_ENABLE="1", FAKE_ARM="refuse")
    assert done.stdout == f"hook {'Refused' if prompt else 'KeyError'}\n"
    assert (done.returncode, done.stderr) == (1, SENTENCE + "\n")


def test_refusal_that_is_not_strict_serves_plain_vllm(box: Sandbox) -> None:
    variables = {"KVOFFLOAD_ENABLE": "1", "KVOFFLOAD_STRICT": "0", "FAKE_ARM": "refuse"}
    assert box.run("-c", "pass", **variables).stderr == ""
    done = box.run("-c", f"{STEP}; import vllm", **variables)
    assert (done.stdout, done.returncode) == (PLAIN, 0)
    assert done.stderr == f"{SENTENCE} vLLM runs without the CPU tier.\n"


def _as_it_is(_: Sandbox, __: Path) -> dict[str, str]:
    return {"FAKE_ARM": "refuse"}


@pytest.mark.parametrize("damage", [_as_it_is, *DAMAGE])
@pytest.mark.parametrize("log", ["2>/dev/full", "2>&-"])
def test_without_a_log_plain_vllm_is_served_all_the_same(
    box: Sandbox, tmp_path: Path, damage: Callable[[Sandbox, Path], dict[str, str]], log: str
) -> None:
    """And standard output has nothing but what the program says."""
    more = damage(box, tmp_path)
    environ = {"KVOFFLOAD_ENABLE": "1", "KVOFFLOAD_STRICT": "0", "ARM_LOG": str(box.arm_log)}
    command = ["sh", "-c", f'exec "$0" "$@" {log}', str(box.python), "-c", STEP]
    done = subprocess.run(command, env={**environ, **more}, cwd=box.root, stdout=subprocess.PIPE)
    assert done.stdout.decode() == PLAIN


def test_what_is_said_never_raises() -> None:
    """`say` alone writes to standard error, and what is run where it cannot be imported."""
    package = ROOT / "kvoffload_patch"
    found = set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Name) and called.id == "print":
                to = {word.arg for word in node.keywords}  # type: ignore[union-attr]
                found |= {file.relative_to(package).as_posix()} if "file" in to else set()
    assert found == {"_bootstrap.py", "_sitecustomize/sitecustomize.py", "__main__.py"}


def test_unexpected_error_is_a_refusal_too(box: Sandbox) -> None:
    done = box.run("-c", STEP, KVOFFLOAD_ENABLE="1", FAKE_ARM="bug")
    assert done.returncode == 2
    (first,) = done.stderr.splitlines()
    assert first.startswith("kvoffload_patch: arming failed unexpectedly with KeyError: 'surprise'")


def test_typo_in_a_variable_is_a_refusal(box: Sandbox) -> None:
    done = box.run("-c", STEP, KVOFFLOAD_ENABLE="1", KVOFFLOAD_CPU_GB="3")
    assert done.returncode == 2
    assert "KVOFFLOAD_CPU_GB is not a variable" in done.stderr.splitlines()[0]
    assert box.armed() == []


@pytest.mark.parametrize("wrong", [{}, {"KVOFFLOAD_CPU_GIB": "many"}, {"KVOFFLOAD_STRICT": "?"}])
def test_disable_wins_over_every_way(box: Sandbox, wrong: dict[str, str]) -> None:
    ways = "import kvoffload_patch as k; k.enable(); from kvoffload_patch._bootstrap import plugin"
    variables = {"KVOFFLOAD_ENABLE": "1", "KVOFFLOAD_DISABLE": "1", "FAKE_ARM": "refuse", **wrong}
    done = box.run("-c", f"{STEP}; {ways}; plugin(); {STEP}", **variables)
    assert (done.stdout, done.stderr) == (PLAIN * 2, "")
    assert box.armed() == []


@pytest.mark.parametrize(("flag", "found"), [("1", PATCHED), ("0", PLAIN), ("", PLAIN)])
def test_plugin_arms_where_the_startup_file_did_not_run(
    box: Sandbox, flag: str, found: str
) -> None:
    code = f"import sys; sys.path.append({str(box.site)!r}); import vllm; " + (
        "from kvoffload_patch._bootstrap import plugin; plugin(); plugin(); "
    )
    done = box.run("-S", "-c", code + STEP, KVOFFLOAD_ENABLE=flag)
    assert (done.stdout, done.stderr) == (found, "")
    assert len(box.armed()) == (found == PATCHED)


def test_plugin_without_the_flag_returns_at_once(box: Sandbox) -> None:
    code = f"from kvoffload_patch._bootstrap import plugin; plugin(); {OURS}"
    assert box.run("-c", code).stdout == "['kvoffload_patch', 'kvoffload_patch._bootstrap']\n"


def test_plugin_does_not_arm_again(box: Sandbox) -> None:
    code = f"{STEP}; from kvoffload_patch._bootstrap import plugin; plugin(); {STEP}"
    assert box.run("-c", code, KVOFFLOAD_ENABLE="1").stdout == PATCHED * 2
    assert len(box.armed()) == 1


def test_plugin_refuses(box: Sandbox) -> None:
    code = f"import sys; sys.path.append({str(box.site)!r}); import vllm; " + (
        "from kvoffload_patch._bootstrap import plugin; plugin()"
    )
    done = box.run("-S", "-c", code, KVOFFLOAD_ENABLE="1", FAKE_ARM="refuse")
    assert (done.returncode, done.stderr) == (2, SENTENCE + "\n")


CHILD = """\
import multiprocessing, sys

def child(queue):
    from vllm.engine import Engine
    queue.put(Engine().step())

if __name__ == "__main__":
    if "first" in sys.argv:
        import vllm
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(queue.get(timeout=20))
    process.join()
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("order", ["first", "later"])
def test_children_are_armed(box: Sandbox, method: str, order: str) -> None:
    script = box.write(box.root / "script.py", CHILD)
    done = box.run(script, method, order, KVOFFLOAD_ENABLE="1")
    assert (done.stdout, done.stderr) == ("patched\n", "")
    assert len(box.armed()) == (2 if (method, order) == ("spawn", "first") else 1)
    assert box.run(script, method, order).stdout == "plain\n"


def test_enable_arms_now_and_for_children(box: Sandbox) -> None:
    code = f"""if 1:
        import os, subprocess, sys, kvoffload_patch
        kvoffload_patch.enable()
        kvoffload_patch.enable()
        print(kvoffload_patch.status()["armed"], "vllm" in sys.modules, flush=True)
        subprocess.run([sys.executable, "-c", {STEP!r}])
        {STEP}"""
    assert box.run("-c", code).stdout == "True False\n" + PATCHED * 2
    assert len(box.armed()) == 2


def test_enable_raises_the_refusal_itself(box: Sandbox) -> None:
    code = """if 1:
        import kvoffload_patch
        for _ in range(2):
            try:
                kvoffload_patch.enable()
            except Exception as error:
                print(type(error).__name__, error)
        print(kvoffload_patch.status()["refusal"])"""
    done = box.run("-c", code, FAKE_ARM="refuse")
    assert done.stdout == f"PatchRefused {REFUSAL}\n" * 2 + f"{REFUSAL}\n"
    assert done.stderr == SENTENCE + "\n"
    wrong = box.run("-c", code, KVOFFLOAD_CPU_GIB="0")
    assert wrong.stdout.startswith("ConfigError KVOFFLOAD_CPU_GIB is '0'")
    plain = box.run("-c", code, FAKE_ARM="refuse", KVOFFLOAD_STRICT="0")
    assert plain.stdout == f"{REFUSAL}\n"


def test_status_reports_without_importing_vllm(box: Sandbox) -> None:
    code = "import sys, kvoffload_patch; s = kvoffload_patch.status(); print('vllm' in sys.modules)"
    keys = "; print(s['release'], s['enabled'], s['armed'], s['refusal'], s['verdict'])"
    done = box.run("-c", code + keys, KVOFFLOAD_ENABLE="1")
    assert done.stdout == "False\n9.9.1 True False None ok\n"
    late = {"KVOFFLOAD_ENABLE": "1", "FAKE_REFUSAL": "refused since."}
    done = box.run("-c", "import vllm; " + code + keys, **late)
    assert done.stdout == "True\n9.9.1 True False refused since. ok\n"
    done = box.run("-c", code + keys, KVOFFLOAD_CPU_GIB="-1")
    assert "KVOFFLOAD_CPU_GIB is '-1'" in done.stdout.splitlines()[1]
    done = box.run("-c", code + keys, KVOFFLOAD_CPU_GIB="60000")
    assert done.stdout.splitlines()[1].startswith("9.9.1 False False None a CPU KV cache of 60000")
    (box.package / "integration/install.py").unlink()
    assert "cannot be imported" in box.run("-c", code + keys).stdout


def test_a_tier_that_can_never_fit_is_refused_before_vllm_is_imported(box: Sandbox) -> None:
    done = box.run("-c", STEP, KVOFFLOAD_ENABLE="1", KVOFFLOAD_CPU_GIB="60000")
    assert done.returncode == 2 and "GiB of memory in all" in done.stderr.splitlines()[0]
    assert box.armed() == []


def test_other_import_hooks_still_work(box: Sandbox) -> None:
    code = "import wrapt; wrapt.register_post_import_hook(lambda m: print(m.__name__), 'vllm'); "
    assert box.run("-c", code + STEP, KVOFFLOAD_ENABLE="1").stdout == "vllm\n" + PATCHED
    front = "import sys; sys.meta_path[:2] = sys.meta_path[1::-1]; "
    assert box.run("-c", code + front + STEP, KVOFFLOAD_ENABLE="1").stdout == "vllm\n" + PATCHED
