"""What cannot be patched when vLLM's modules are imported, strict and not, in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from integration.patch_table import test_ascend as of_ascend
from integration.patch_table import test_points as of_vllm

from kvoffload_patch.launch_token import ATTACHED, DECIDED, confirmed

CORE, RUNNER = "vllm.v1.engine.core", "vllm.v1.worker.gpu_model_runner"
SECOND = "vllm.v1.worker.gpu.model_runner"
# Another package is first: its hook for a module is called before ours.
BEGIN = """\
import importlib, json, os, sys, wrapt
def theirs(self): pass
def replace(module, cls, attribute, where=os.getpid):
    def hook(found):
        if os.getpid() == where():
            setattr(getattr(found, cls), attribute, theirs)
    wrapt.register_post_import_hook(hook, module)
def plain(module, cls, attribute):
    found = vars(getattr(sys.modules[module], cls))[attribute]
    return found is theirs or type(found) is type(theirs)
def tell(**found):
    print("FOUND " + json.dumps(found))
"""
FAILING = {
    "engine core": (CORE, "EngineCore", "__init__"),
    "runner": (RUNNER, "GPUModelRunner", "execute_model"),
    "decoder": ("vllm.v1.serial_utils", "MsgpackDecoder", "__init__"),
}
POINTS = [(CORE, "EngineCore", "__init__"), (CORE, "EngineCore", "shutdown")]
POINTS += [(RUNNER, "GPUModelRunner", name) for name in ("load_model", "execute_model")]
POINTS += [FAILING["decoder"]]
IMPORT_ALL = f"""
for module in {list(dict.fromkeys(p[0] for p in POINTS))!r}:
    importlib.import_module(module)
"""
REPORT = f"""
import kvoffload_patch
from kvoffload_patch.integration import install
from kvoffload_patch.integration.worker.vllm_runner import runner_is_patched
status = kvoffload_patch.status()
tell(plain=[plain(*p) for p in {POINTS!r}],
     installed=sorted(c.__module__ for c, _ in install.installed()),
     armed=status["armed"], refusal=status["refusal"], kept=install.keep_installed(),
     worker=runner_is_patched(object.__new__(sys.modules[{RUNNER!r}].GPUModelRunner)),
     disabled=os.environ.get("KVOFFLOAD_DISABLE"), maps=open("/proc/self/maps").read())
"""
TOKEN = "0f1e2d3c"
# Stubs have bodies of no release; a function with other parameters is refused in any case.
SWITCHES = {
    "KVOFFLOAD_ENABLE": "1",
    "KVOFFLOAD_ALLOW_UNVERIFIED": "1",
    "KVOFFLOAD_LAUNCH": TOKEN,
}
MAIN = "from kvoffload_patch import _bootstrap\n_bootstrap.main()\n"


def run(
    folder: Path, code: str, release: str = of_vllm.NEWEST, **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """Run code beside stubs of a vLLM; what it tells."""
    find = of_vllm.stubs(of_vllm.SNAPSHOTS[release], folder)
    for module in {point[0] for point in POINTS} | {SECOND}:  # annotations name what is not there
        text = find(module).read_text()
        find(module).write_text("from __future__ import annotations\n" + text)
    of_vllm._install(release, folder)
    done = of_vllm._run(["-c", BEGIN + code], folder, **{**SWITCHES, **variables})
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    return done, [json.loads(line.removeprefix("FOUND ")) for line in lines]


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [text for text in done.stderr.splitlines() if "ALLOW_UNVERIFIED patches" not in text]


def only(done: subprocess.CompletedProcess[str], found: list[dict[str, Any]]) -> dict[str, Any]:
    assert (done.returncode, len(found)) == (0, 1), done.stderr
    return found[0]


@pytest.mark.parametrize("what", FAILING.values(), ids=list(FAILING))
def test_one_line_and_vllm_is_as_it_was_made(what: tuple[str, ...], tmp_path: Path) -> None:
    code = MAIN + f"replace(*{what!r})\n" + IMPORT_ALL + REPORT
    done, told = run(tmp_path, code, KVOFFLOAD_STRICT="0")
    found = only(done, told)
    (line,) = errors(done)
    refusal = found["refusal"]
    assert line == f"kvoffload_patch: {refusal} Serving without the CPU tier."
    assert "(it is now __main__.theirs). Nothing was patched; set KVOFFLOAD_STRICT=0" in refusal
    assert found["plain"] == [True] * len(POINTS) and found["installed"] == []
    assert found["kept"] == found["worker"] == refusal, "a worker says it to the engine"
    assert (found["armed"], found["disabled"]) == (False, "1")
    assert confirmed(DECIDED, TOKEN, found["maps"])
    assert not confirmed(ATTACHED, TOKEN, found["maps"]), "no engine has started"


@pytest.mark.parametrize("what", FAILING.values(), ids=list(FAILING))
def test_strict_ends_the_import(what: tuple[str, ...], tmp_path: Path) -> None:
    done, told = run(tmp_path, MAIN + f"replace(*{what!r})\n" + IMPORT_ALL + REPORT)
    assert done.returncode == 1 and not told
    assert done.stderr.rstrip().endswith("set KVOFFLOAD_STRICT=0 to serve without the CPU tier.")
    assert "kvoffload_patch.patching.errors.SignatureMismatch: " in done.stderr


@pytest.mark.parametrize("strict", ["0", "1"])
def test_without_others_every_point_is_installed(strict: str, tmp_path: Path) -> None:
    """So what is plain above is so because it was refused."""
    done, told = run(tmp_path, MAIN + IMPORT_ALL + REPORT, KVOFFLOAD_STRICT=strict)
    found = only(done, told)
    assert errors(done) == [] and found["plain"] == [False] * len(POINTS)
    assert (found["armed"], found["refusal"], found["disabled"]) == (True, None, None)
    assert found["worker"] == found["kept"] == ""


@pytest.mark.parametrize("imported", [CORE, RUNNER])
def test_a_module_that_was_imported_before_is_said_by_who_arms(
    imported: str, tmp_path: Path
) -> None:
    """By the plugin entry point, or `enable` after vLLM: no later import may fail of it."""
    what = next(what for what in FAILING.values() if what[0] == imported)
    code = f"replace(*{what!r})\nimport {imported}\nos.environ['KVOFFLOAD_ENABLE'] = '1'\n"
    code += "from kvoffload_patch._bootstrap import plugin\nplugin()\n" + IMPORT_ALL + REPORT
    done, told = run(tmp_path, code, KVOFFLOAD_STRICT="0", KVOFFLOAD_ENABLE="")
    found = only(done, told)
    (line,) = errors(done)
    assert line == f"kvoffload_patch: {found['refusal']} vLLM runs without the CPU tier."
    assert found["plain"] == [True] * len(POINTS) and found["installed"] == []


CHILD = f"""
import subprocess
subprocess.run([sys.executable, "-c", {(BEGIN + MAIN + IMPORT_ALL + REPORT)!r}], check=True)
"""
FORKED = "if os.fork():\n    os.wait()\n    raise SystemExit\n"


@pytest.mark.parametrize("child", [CHILD, FORKED + IMPORT_ALL + REPORT], ids=["spawned", "forked"])
def test_children_of_a_process_that_was_refused_take_no_part(child: str, tmp_path: Path) -> None:
    """A worker that is patched takes memory in advance, which no engine would give back."""
    code = MAIN + f"replace(*{FAILING['engine core']!r})\nimport {CORE}\n" + child
    done, told = run(tmp_path, code, KVOFFLOAD_STRICT="0")
    found = only(done, told)
    assert len(errors(done)) == 1, "the child has nothing to say"
    assert found["plain"] == [True] * len(POINTS) and not found["installed"]
    assert confirmed(DECIDED, TOKEN, found["maps"])


def test_a_child_that_is_refused_alone_says_so_itself(tmp_path: Path) -> None:
    """As a worker does; the engine hears of it when it asks its ranks."""
    alone = f"me = os.getpid()\nreplace(*{FAILING['runner']!r}, "
    alone += "lambda: 0 if os.getpid() == me else os.getpid())\n"
    code = alone + MAIN + f"import {CORE}\n" + FORKED + IMPORT_ALL + REPORT
    done, told = run(tmp_path, code, KVOFFLOAD_STRICT="0")
    found = only(done, told)
    assert len(errors(done)) == 1 and found["worker"] == found["refusal"] != ""
    assert found["plain"] == [True] * len(POINTS)


def test_a_runner_that_was_loaded_once_more_is_not_patched(tmp_path: Path) -> None:
    done, told = run(
        tmp_path, MAIN + IMPORT_ALL + f"importlib.reload(sys.modules[{RUNNER!r}])\n" + REPORT
    )
    found = only(done, told)
    assert f"found {RUNNER}.GPUModelRunner.execute_model as vLLM made it" in found["worker"]
    assert "or loaded its module once more since" in found["worker"]


OF_ASCEND = (of_ascend.RUNNER, "NPUModelRunner", "execute_model")


@pytest.mark.parametrize("refused", [FAILING["engine core"], OF_ASCEND])
def test_vllm_and_vllm_ascend_are_patched_both_or_neither(
    refused: tuple[str, ...], tmp_path: Path
) -> None:
    of_ascend.stubs(of_ascend.SNAPSHOTS["0.23.0"], tmp_path)
    info = tmp_path / "vllm_ascend-0.23.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-ascend\nVersion: 0.23.0\n")
    code = MAIN + f"replace(*{refused!r})\n" + IMPORT_ALL + f"import {of_ascend.RUNNER}\n" + REPORT
    done, told = run(tmp_path, code, "0.23.0", KVOFFLOAD_STRICT="0")
    found = only(done, told)
    assert len(errors(done)) == 1 and found["installed"] == []
    assert found["plain"] == [True] * len(POINTS)


def test_if_one_of_them_cannot_be_armed_the_other_is_not(tmp_path: Path) -> None:
    """vllm-ascend was imported before, and another has replaced what is to be patched there."""
    of_ascend.stubs(of_ascend.SNAPSHOTS["0.23.0"], tmp_path)
    info = tmp_path / "vllm_ascend-0.23.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-ascend\nVersion: 0.23.0\n")
    code = f"replace(*{OF_ASCEND!r})\nimport {of_ascend.RUNNER}\n" + IMPORT_ALL
    code += "os.environ['KVOFFLOAD_ENABLE'] = '1'\n"
    code += "from kvoffload_patch._bootstrap import plugin\nplugin()\n" + REPORT
    done, told = run(tmp_path, code, "0.23.0", KVOFFLOAD_STRICT="0", KVOFFLOAD_ENABLE="")
    found = only(done, told)
    assert len(errors(done)) == 1 and "vLLM runs without the CPU tier." in errors(done)[0]
    assert found["plain"] == [True] * len(POINTS) and found["installed"] == []


def test_what_a_tier_uses_stays_when_a_later_module_is_refused(tmp_path: Path) -> None:
    """A step whose plan is not carried out would read what no load has brought."""
    code = f"replace({SECOND!r}, 'GPUModelRunner', 'execute_model')\n" + MAIN + IMPORT_ALL
    code += "from kvoffload_patch.integration import install\nassert not install.keep_installed()\n"
    code += f"import {SECOND}\n" + REPORT
    done, told = run(tmp_path, code, KVOFFLOAD_STRICT="0")
    found = only(done, told)
    (line,) = errors(done)
    assert "What is in use already stays patched" in line
    assert found["plain"] == [False] * len(POINTS)
    assert not [name for name in found["installed"] if name.startswith(SECOND)]
    assert found["worker"] == found["refusal"], "no other runner of this process takes part"


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs Linux")
def test_the_engine_of_an_installed_vllm_is_as_it_was_made(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    code = BEGIN + MAIN + f"replace(*{FAILING['engine core']!r})\n" + IMPORT_ALL + REPORT
    variables = {k: v for k, v in os.environ.items() if not k.startswith("KVOFFLOAD_")}
    env = {**variables, **SWITCHES, "KVOFFLOAD_ALLOW_UNVERIFIED": "0", "KVOFFLOAD_STRICT": "0"}
    env["PYTHONPATH"] = str(of_vllm.ROOT)
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    found = only(done, [json.loads(line.removeprefix("FOUND ")) for line in lines])
    assert (done.stdout + done.stderr).count("Serving without the CPU tier.") == 1, done.stderr
    assert found["plain"] == [True] * len(POINTS) and found["installed"] == []
