"""`python -m kvoffload_patch`: what it says, how it exits, and what the command then finds."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from sandbox import REFUSAL, Sandbox, imported

READY = "kvoffload_patch 0.1.0: vLLM 9.9.1, 2 patch points match, {} GiB CPU KV cache, loads {}\n"
AUTO = r"about [\d.]+ GiB \(1/2 of the [\d.]+ GiB that .+ can give\) CPU KV cache, loads auto\n"
SHOW = """\
import json, os, sys
from vllm.engine import Engine
ours = {k: v for k, v in os.environ.items() if k.startswith(("KVOFFLOAD_", "PYTHONPATH"))}
token = ours.pop("KVOFFLOAD_LAUNCH", "")
print(json.dumps({"argv": sys.argv[1:], "step": Engine().step(), "env": ours, "token": token}))
"""


@pytest.fixture
def box(tmp_path: Path) -> Sandbox:
    box = Sandbox(tmp_path / "box")
    box.command("vllm", SHOW)
    return box


@pytest.fixture
def bare(tmp_path: Path) -> Sandbox:
    """The package without its start-up file, as on a plain PYTHONPATH."""
    box = Sandbox(tmp_path / "bare", startup_file=False)
    box.command("vllm", SHOW)
    return box


def test_command_runs_armed_with_the_options_in_its_environment(box: Sandbox) -> None:
    options = ["--cpu-gib", "0.001", "--load-mode=inline", "--log-interval", "2.5"]
    command = ["vllm", "serve", "MODEL", "--check", "--cpu-gib", "9"]
    done = box.run("-m", "kvoffload_patch", *options, *command, KVOFFLOAD_LOAD_MODE="parked")
    assert done.stderr == READY.format("0.001", "inline")
    found = json.loads(done.stdout)
    assert len(found.pop("token")) == 16
    assert found == {
        "argv": ["serve", "MODEL", "--check", "--cpu-gib", "9"],
        "step": "patched",
        "env": {
            "KVOFFLOAD_ENABLE": "1",
            "KVOFFLOAD_CPU_GIB": "0.001",
            "KVOFFLOAD_LOAD_MODE": "inline",
            "KVOFFLOAD_LOG_INTERVAL": "2.5",
            "KVOFFLOAD_OPTIONS": "KVOFFLOAD_CPU_GIB,KVOFFLOAD_LOAD_MODE,KVOFFLOAD_LOG_INTERVAL",
        },
    }


def test_environment_alone_is_enough(box: Sandbox) -> None:
    done = box.run("-m", "kvoffload_patch", "vllm", KVOFFLOAD_CPU_GIB="1", KVOFFLOAD_ENABLE="0")
    assert done.stderr == READY.format("1.0", "auto")
    assert json.loads(done.stdout)["step"] == "patched"


@pytest.mark.parametrize("words", [["python", "show.py"], ["show.py"], ["--", "./bin/vllm"]])
def test_python_scripts_and_paths(box: Sandbox, words: list[str]) -> None:
    box.write(box.root / "show.py", SHOW)
    done = box.run("-m", "kvoffload_patch", *words, "--help")
    found = json.loads(done.stdout)
    assert (found["argv"], found["step"]) == (["--help"], "patched")


def test_exit_status_is_the_commands(box: Sandbox) -> None:
    assert box.run("-m", "kvoffload_patch", "python", "-c", "raise SystemExit(7)").returncode == 7


def test_command_found_on_path(box: Sandbox) -> None:
    tool = box.write(box.root / "tools/mytool", f"#!/usr/bin/env {box.python}\nprint('tool')\n")
    tool.chmod(0o755)
    done = box.run("-m", "kvoffload_patch", "mytool", PATH=f"{tool.parent}:/usr/bin:/bin")
    assert done.stdout == "tool\n"


def test_a_file_that_is_no_program_is_said_to_be_there(box: Sandbox) -> None:
    script = box.write(box.root / "serve.sh", "#!/bin/sh\n")
    for word, said in (
        (script, f"found {script}, which this user may not execute; make it executable (`chmod"),
        (box.root, f"found {box.root}, a folder; correct it."),
    ):
        done = box.run("-m", "kvoffload_patch", "--", str(word))
        assert done.returncode == 2 and said in done.stderr.splitlines()[-1]


def test_unknown_command(box: Sandbox) -> None:
    done = box.run("-m", "kvoffload_patch", "no-such-command")
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("kvoffload_patch: 'no-such-command' is neither beside ")
    assert last.endswith(" expected a program to run; correct it, or give its path.")
    (line,) = box.run("-m", "kvoffload_patch", "statsu").stderr.splitlines()
    assert "the closest command of kvoffload is status; correct it" in line
    (line,) = box.run("-m", "kvoffload_patch", "serve", "m").stderr.splitlines()[-1:]
    assert "expected a program to run, such as `kvoffload vllm serve MODEL`; correct it" in line


def test_command_that_cannot_be_executed(box: Sandbox) -> None:
    (box.bin / "broken").write_bytes(b"\x00\x01")
    (box.bin / "broken").chmod(0o755)
    done = box.run("-m", "kvoffload_patch", "broken")
    assert done.returncode == 2
    said = f"kvoffload_patch: expected to run {box.bin}/broken, found "
    assert done.stderr.splitlines()[-1].startswith(said)


def test_check_only_reports(box: Sandbox) -> None:
    size = {"KVOFFLOAD_CPU_GIB": "1"}
    done = box.run("-m", "kvoffload_patch", "--check", "vllm", "serve", **size)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", READY.format("1.0", "auto"))
    assert box.run("-m", "kvoffload_patch", "--check").returncode == 0
    assert box.armed() == []


def test_check_for_programs(box: Sandbox) -> None:
    for variables, ok in (({}, True), ({"FAKE_ARM": "refuse"}, False)):
        done = box.run("-m", "kvoffload_patch", "--check", "--json", "vllm", **variables)
        found = json.loads(done.stdout)
        assert (done.returncode, done.stderr, found["ok"]) == (0 if ok else 2, "", ok)
        assert len(found["said"]) == 1


@pytest.mark.parametrize("options", [[], ["--cpu-gib", "auto"]])
def test_a_size_that_nobody_has_said_is_said_with_its_reason(
    box: Sandbox, options: list[str]
) -> None:
    done = box.run("-m", "kvoffload_patch", *options, "--check")
    assert done.returncode == 0
    assert re.fullmatch(re.escape(READY.partition("{}")[0]) + AUTO, done.stderr)


def test_all_that_is_wrong_is_said_at_once_by_the_name_it_was_given(box: Sandbox) -> None:
    options = ["--cpu-gib", "lots", "--log-interval", "0"]
    done = box.run("-m", "kvoffload_patch", *options, "vllm", KVOFFLOAD_MAX_STALL_MS="x")
    assert done.returncode == 2
    for name in ("--cpu-gib is 'lots'", "--log-interval is '0'", "KVOFFLOAD_MAX_STALL_MS is 'x'"):
        assert name in done.stderr
    assert "KVOFFLOAD_CPU_GIB" not in done.stderr


def test_a_process_of_the_command_names_the_option_as_well(box: Sandbox) -> None:
    box.command("late", "import os\nos.environ['KVOFFLOAD_CPU_GIB'] = '60000'\nimport vllm\n")
    done = box.run("-m", "kvoffload_patch", "--cpu-gib", "1", "late")
    assert done.returncode == 2 and "; lower --cpu-gib." in done.stderr


@pytest.mark.parametrize("strict", ["1", "0"])
@pytest.mark.parametrize("arm", ["ok", "refuse"])
@pytest.mark.parametrize("command", ["vllm", "isolated", "missing"])
def test_check_says_what_the_start_says(box: Sandbox, strict: str, arm: str, command: str) -> None:
    box.command("isolated", SHOW).write_text(f"#!{box.python} -S\n{SHOW}")
    variables = {"KVOFFLOAD_STRICT": strict, "FAKE_ARM": arm, "KVOFFLOAD_CPU_GIB": "1"}
    check = box.run("-m", "kvoffload_patch", "--check", command, **variables)
    start = box.run("-m", "kvoffload_patch", command, **variables)
    said = [line for line in start.stderr.splitlines() if line.startswith("kvoffload_patch")]
    assert (check.stdout, check.stderr.splitlines()) == ("", said)
    assert check.returncode == (0 if (command, arm) == ("vllm", "ok") else 2)


def test_refusal_exits_before_the_command(box: Sandbox) -> None:
    done = box.run("-m", "kvoffload_patch", "vllm", "serve", FAKE_ARM="refuse")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"kvoffload_patch: {REFUSAL}\n"


def test_refusal_that_is_not_strict_runs_plain(box: Sandbox) -> None:
    done = box.run("-m", "kvoffload_patch", "vllm", FAKE_ARM="refuse", KVOFFLOAD_STRICT="no")
    assert done.stderr == f"kvoffload_patch: {REFUSAL} vLLM runs without the CPU tier.\n"
    found = json.loads(done.stdout)
    assert (found["step"], found["env"]["KVOFFLOAD_DISABLE"]) == ("plain", "1")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--cpu-gib", "lots"], "--cpu-gib is 'lots', expected a number of GiB above 0"),
        (["--cpu-gib", "1e300"], "--cpu-gib is '1e300', expected a number of GiB above 0, 65536"),
        (["--load-mode", "fast"], "--load-mode is 'fast', expected one of auto, inline"),
        (["--cpu-gib", "6e4"], "a CPU KV cache of 60000.0 GiB was asked for, but only"),
        (
            ["--cpu-gib", "6e4", "--load-mode", "fast"],
            "--load-mode is 'fast', expected one of auto, inline, parked; correct it or leave it"
            " out (see python -m kvoffload_patch --help). a CPU KV cache of 60000.0 GiB",
        ),
    ],
)
def test_wrong_options(box: Sandbox, options: list[str], sentence: str) -> None:
    done = box.run("-m", "kvoffload_patch", *options, "vllm")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"kvoffload_patch: {sentence}")


def test_unknown_option_and_no_command(box: Sandbox) -> None:
    unknown = box.run("-m", "kvoffload_patch", "--cpu", "4", "vllm")
    assert unknown.returncode == 2 and "--cpu" in unknown.stderr
    nothing = box.run("-m", "kvoffload_patch")
    assert nothing.returncode == 2 and nothing.stderr.startswith(
        "usage: kvoffload [options] COMMAND"
    )


@pytest.mark.parametrize("strict", ["1", "0"])
def test_disable_runs_plain(box: Sandbox, strict: str) -> None:
    switches = {"KVOFFLOAD_DISABLE": "1", "KVOFFLOAD_STRICT": strict, "FAKE_ARM": "refuse"}
    done = box.run("-m", "kvoffload_patch", "vllm", KVOFFLOAD_ENABLE="1", **switches)
    assert json.loads(done.stdout)["step"] == "plain"
    assert done.stderr == "kvoffload_patch: KVOFFLOAD_DISABLE is set, so nothing is patched.\n"
    wrong = box.run("-m", "kvoffload_patch", "vllm", KVOFFLOAD_DISABLE="perhaps")
    assert wrong.returncode == 2 and "KVOFFLOAD_DISABLE is 'perhaps'" in wrong.stderr


def without_engines(text: str) -> str:
    """What `status` says of the installation; servers of this machine may run beside the test."""
    head, found, _ = text.partition("\nengine")
    return head + "\n" if found else text


def test_status_shows_everything_and_does_not_import_vllm(box: Sandbox) -> None:
    done = box.run("-X", "importtime", "-m", "kvoffload_patch", "status", KVOFFLOAD_ENABLE="1")
    head = [
        "kvoffload_patch 0.1.0",
        "switch:       on (KVOFFLOAD_ENABLE=1)",
        "vLLM:         9.9.1",
        "supported:    >=9.0,<9.9",
    ]
    assert without_engines(done.stdout).splitlines() == [
        *head, "patch points: 2 (--points lists them)", "verdict:      ok",
    ]  # fmt: skip
    listed = box.run("-m", "kvoffload_patch", "status", "--points", KVOFFLOAD_ENABLE="1")
    assert without_engines(listed.stdout).splitlines() == [
        *head,
        "patch points: 2",
        "  engine.step  vllm.engine:Engine.step",
        "  other        vllm.other:Other.stop",
        "verdict:      ok",
    ]
    seen = imported(done.stderr)
    assert "kvoffload_patch.cli.report" in seen and "vllm" not in seen
    assert "vllm" in imported(box.run("-X", "importtime", "-c", "import vllm").stderr)


def test_status_of_a_refusal(box: Sandbox) -> None:
    switches = {"KVOFFLOAD_ENABLE": "1", "KVOFFLOAD_DISABLE": "1", "FAKE_ARM": "refuse"}
    done = box.run("-m", "kvoffload_patch", "status", **switches)
    assert "switch:       off (KVOFFLOAD_ENABLE=1, KVOFFLOAD_DISABLE=1)" in done.stdout
    assert without_engines(done.stdout).endswith(f"verdict:      {REFUSAL}\n")
    assert done.returncode == 2
    found = json.loads(box.run("-m", "kvoffload_patch", "status", "--json", **switches).stdout)
    assert (found["verdict"], found["enabled"], found["release"]) == (REFUSAL, False, "9.9.1")


def test_status_says_what_is_wrong_with_settings_and_with_vllm_at_once(box: Sandbox) -> None:
    """A user who has mended the one would find the other only then."""
    done = box.run("-m", "kvoffload_patch", "status", KVOFFLOAD_ENABEL="1")
    assert "vLLM:         9.9.1\n" in done.stdout and "patch points: 2 (" in done.stdout
    assert "the closest one is KVOFFLOAD_ENABLE" in done.stdout and done.returncode == 2
    both = {"KVOFFLOAD_ENABEL": "1", "FAKE_ARM": "refuse"}
    done = box.run("-m", "kvoffload_patch", "status", **both)
    assert without_engines(done.stdout).endswith(f" {REFUSAL}\n") and done.returncode == 2
    assert "the closest one is KVOFFLOAD_ENABLE" in done.stdout


def test_check_asks_for_what_only_installing_needs(box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "wrapt.py").write_text("raise ImportError('no wrapt here')\n")
    done = box.run("-m", "kvoffload_patch", "--check", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "(no wrapt here); reinstall kvoffload_patch with its dependencies there." in done.stderr


def test_status_for_programs(box: Sandbox) -> None:
    done = box.run("-m", "kvoffload_patch", "--cpu-gib", "1", "status", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["verdict"], found["armed"]) == (0, "ok", False)
    assert [point["name"] for point in found["points"]] == ["engine.step", "other"]
    wrong = box.run("-m", "kvoffload_patch", "--cpu-gib", "x", "status", "--json")
    assert wrong.returncode == 2
    assert json.loads(wrong.stdout)["verdict"].startswith("--cpu-gib is 'x', expected")
    assert box.run("-m", "kvoffload_patch", "status", "--jsn").returncode == 2


WRITES = [["status"], ["status", "--json"], ["--help"], ["--check", "--json"]]


def written(
    box: Sandbox, words: list[str], out: Any, through: str = ""
) -> subprocess.CompletedProcess[bytes]:
    """A command whose output goes there; perhaps by a shell."""
    begin = ["sh", "-c", through, "sh"] if through else [str(box.python)]
    command = [*begin, "-m", "kvoffload_patch", *words]
    return subprocess.run(
        command, env={"PATH": "/usr/bin:/bin"}, cwd=box.root, stdout=out, stderr=subprocess.PIPE
    )


@pytest.mark.parametrize("words", WRITES, ids=" ".join)
def test_output_that_finds_no_room_ends_with_a_sentence(box: Sandbox, words: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = written(box, words, full)
    said = done.stderr.decode()
    assert done.returncode == 2
    assert said.endswith(
        "kvoffload_patch: expected to write what was asked for, found No space left on device; "
        "make room there, or have it written elsewhere.\n"
    )
    assert "Traceback" not in said and "Exception ignored" not in said


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8:strict"])
def test_what_the_encoding_of_the_output_lacks_is_escaped(box: Sandbox, encoding: str) -> None:
    """Names of models, folders and variables may have any character, and bytes that are none."""
    odd = {"KVOFFLOAD_ENABLE": "\u0416", "KVOFFLOAD_\udcff": "1", "PYTHONIOENCODING": encoding}
    done = box.run("-m", "kvoffload_patch", "status", **odd)
    assert "Traceback" not in done.stderr and done.returncode == 2
    assert "verdict:" in done.stdout and "KVOFFLOAD_\\udcff is not a variable" in done.stdout


def test_a_command_whose_log_is_full_runs(box: Sandbox) -> None:
    done = box.root / "done"
    code = f"import pathlib; pathlib.Path({str(done)!r}).touch()"
    through = f"exec '{box.python}' \"$@\" > /dev/full 2>&1"
    assert written(box, ["python", "-c", code], None, through).returncode == 0
    assert done.exists()
    assert written(box, ["status"], None, through).returncode != 0


@pytest.mark.parametrize("words", WRITES, ids=" ".join)
def test_a_reader_that_has_enough_is_no_error(box: Sandbox, words: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = written(box, words, write)
    finally:
        os.close(write)
    said = done.stderr.decode()
    assert done.returncode == 0 and "Traceback" not in said and "Exception ignored" not in said


def test_without_standard_output_it_runs(box: Sandbox) -> None:
    done = written(box, ["status"], None, f"exec '{box.python}' \"$@\" >&-")
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("closed", ["2>&-", "<&- 2>&-"])
def test_without_standard_error_the_command_runs(box: Sandbox, closed: str) -> None:
    """And what it opens gets no number under which others write errors."""
    code = "import os; print(os.readlink('/proc/self/fd/2'))"
    through = f"exec '{box.python}' \"$@\" {closed}"
    done = written(box, ["python", "-c", code], subprocess.PIPE, through)
    assert (done.returncode, done.stdout) == (0, b"/dev/null\n")


def test_help_and_version(box: Sandbox) -> None:
    done = box.run("-m", "kvoffload_patch", "--help")
    assert done.returncode == 0
    for text in (
        "--cpu-gib",
        "KVOFFLOAD_MAX_STALL_MS",
        "(default: 20.0 ms)",
        "examples:",
    ):
        assert text in done.stdout
    assert box.run("-m", "kvoffload_patch", "--version").stdout == "kvoffload_patch 0.1.0\n"


def test_without_the_startup_file_pythonpath_does_it(bare: Sandbox) -> None:
    variables = {"PYTHONPATH": "/mine:/yours", "KVOFFLOAD_CPU_GIB": "1"}
    done = bare.run("-m", "kvoffload_patch", "vllm", **variables)
    assert done.stderr == READY.format("1.0", "auto")
    found = json.loads(done.stdout)
    assert found["step"] == "patched"
    assert found["env"]["PYTHONPATH"] == f"{bare.package}/_sitecustomize:/mine:/yours"


def test_command_of_another_environment_gets_the_folder(box: Sandbox, bare: Sandbox) -> None:
    box.command("theirs", SHOW).write_text(f"#!{bare.python}\n{SHOW}")
    found = json.loads(box.run("-m", "kvoffload_patch", "theirs").stdout)
    assert found["step"] == "patched"
    assert found["env"]["PYTHONPATH"] == f"{box.package}/_sitecustomize"


def test_a_python_that_would_not_run_the_start_up_code_is_refused(box: Sandbox) -> None:
    box.command("isolated", "").write_text(f"#!{box.python} -S\n{SHOW}")
    done = box.run("-m", "kvoffload_patch", "isolated")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[1:] == [
        f"kvoffload_patch: expected `{box.python} -S`, which runs {box.bin}/isolated, to run the"
        " start-up code of kvoffload_patch, found that it does not; install kvoffload_patch for"
        " that Python and let it read its site-packages and its environment."
    ]


def test_a_python_that_cannot_run_is_a_sentence(box: Sandbox) -> None:
    python = box.write(box.root / "other/python3", "\x7fELF")
    python.chmod(0o755)
    box.command("theirs", "").write_text(f"#!{python}\n{SHOW}")
    done = box.run("-m", "kvoffload_patch", "theirs")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[1:] == [
        f"kvoffload_patch: expected to run {python}, found Exec format error; give a program whose"
        " Python this system can run."
    ]


@pytest.mark.parametrize("name", ["python_serve", "python.sh", "python3-serve", "pythonic"])
def test_a_program_that_is_called_almost_python_runs_once(box: Sandbox, name: str) -> None:
    """It was asked what a Python is asked: run, with options that it does not know."""
    box.write(box.bin / name, '#!/bin/sh\necho "$@" >> ran\n').chmod(0o755)
    assert box.run("-m", "kvoffload_patch", name, "MODEL").returncode == 0
    assert (box.root / "ran").read_text() == "MODEL\n"


@pytest.mark.parametrize("name", ["python3.99", "python3.13t", "python3d", "python3-dbg"])
def test_a_python_is_known_by_its_name(bare: Sandbox, name: str) -> None:
    (bare.root / "other").mkdir()
    (bare.root / f"other/{name}").symlink_to(bare.python)
    bare.command("theirs", "").write_text(f"#!{bare.root}/other/{name} -S\n{SHOW}")
    done = bare.run("-m", "kvoffload_patch", "theirs")
    assert done.returncode == 2 and "found that it does not" in done.stderr


def test_the_command_ignores_no_more_signals_than_without_us(box: Sandbox) -> None:
    """Else `yes | head` in a script writes errors: a shell cannot take that back."""
    command = ["grep", "SigIgn", "/proc/self/status"]
    plain = subprocess.run(command, capture_output=True, text=True).stdout
    assert box.run("-m", "kvoffload_patch", *command).stdout == plain


def test_a_wrapper_gets_the_folder_for_whatever_python_it_runs(box: Sandbox, bare: Sandbox) -> None:
    wrapper = box.write(box.root / "wrapper.sh", f"#!/bin/sh\nexec {bare.bin}/vllm serve\n")
    wrapper.chmod(0o755)
    for command in ([wrapper], ["sh", wrapper]):
        done = box.run("-m", "kvoffload_patch", *command)
        assert json.loads(done.stdout)["step"] == "patched"


def test_package_found_through_the_current_folder_only(bare: Sandbox) -> None:
    (bare.root / "checkout").mkdir()
    bare.package.rename(bare.root / "checkout/kvoffload_patch")
    code = "import os, runpy, sys; os.chdir('checkout'); sys.path.insert(0, os.getcwd())"
    code += "; sys.argv[1:] = ['vllm']; runpy.run_module('kvoffload_patch', run_name='__main__')"
    assert json.loads(bare.run("-c", code).stdout)["step"] == "patched"


@pytest.mark.parametrize("words", [["doctor"], ["patch", "--check"]])
def test_a_requirement_that_is_missing_is_a_sentence(box: Sandbox, words: list[str]) -> None:
    done = box.run("-m", "kvoffload_patch", *words)  # that environment has not all of the package
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "reinstall kvoffload_patch with its dependencies" in done.stderr


@pytest.mark.parametrize("file", ["__init__.py", "config.py", "cli/main.py", "cli/options.py"])
def test_a_package_that_is_half_deleted_is_a_sentence(file: str, box: Sandbox) -> None:
    (box.package / file).unlink()
    for words in (["status"], ["vllm", "serve"]):
        done = box.run("-m", "kvoffload_patch", *words)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2
        assert line.startswith("kvoffload_patch: the package cannot be imported by ")
        assert line.endswith("; reinstall it there.")


@pytest.mark.parametrize("file", ["cli/main.py", "cli/report.py"])
def test_ctrl_c_is_the_status_that_shells_have_for_it(file: str, box: Sandbox) -> None:
    """While the command line is imported as well as while it works."""
    (box.package / file).write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    done = box.run("-m", "kvoffload_patch", "status")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
