"""The command line: options, then hand over to a report or to the command."""

from __future__ import annotations

import argparse
import difflib
import errno
import io
import json
import os
import sys
from collections.abc import Sequence

from kvoffload_patch import __version__
from kvoffload_patch._bootstrap import WITHOUT, is_strict, say, sentence, with_name
from kvoffload_patch.cli import launch, preflight
from kvoffload_patch.cli.options import EXIT_OK, EXIT_REFUSED, Parser
from kvoffload_patch.config import AUTO, VARIABLES, option

_OWN = (
    "status", "doctor", "bench", "patch", "top", "pause", "resume", "empty", "resize", "set",
)  # fmt: skip

_USAGE = """\
kvoffload [options] COMMAND [ARGUMENT ...]
       kvoffload [options] --check [--json] [COMMAND]
       kvoffload [options] status | doctor [--json]
       kvoffload top | pause | resume | empty | resize GIB | set ... [--engine NAME]
       kvoffload bench --model MODEL [options] [-- ARGUMENT ...]
       kvoffload patch --apply | --revert | --check [--json]
(python -m kvoffload_patch is the same)"""

_DESCRIPTION = """\
Run COMMAND, such as `vllm serve MODEL`, with a second KV-cache tier in CPU memory. COMMAND is
looked for beside this Python first, then on PATH. Whatever follows it belongs to it.
`status` shows the switch, the installed vLLM, the verdict, and the engines that run; with
`--points` every patch point. `top` shows the engines as they work; `pause`, `resume`, `empty`,
`resize` and `set` are commands for them. Each has a --help of its own; `-- top` runs another
program of that name.
`doctor` also looks at memory, limits and the bus, proves that the patch arms, says what would be
chosen, and names every problem with its remedy.
`bench` compares this machine without and with the tier, and with vLLM's own connectors.
`patch` puts the lines that arm the tier into vLLM's own files, for images without start-up
files."""

_EXAMPLES = """\
examples:
  kvoffload vllm serve MODEL                  a tier of half the memory that is to be had
  kvoffload --cpu-gib 64 vllm serve MODEL     a tier of 64 GiB
  kvoffload --check vllm serve MODEL          would it run? nothing is started
  kvoffload doctor                            what is wrong here, what would be chosen
  kvoffload bench --model MODEL               does it pay here? off against on
  kvoffload status --json                     the same for a program
  kvoffload top                               running engines, live
  kvoffload resize 24                         24 GiB for the engine that runs
  kvoffload -- ./serve.sh                     a script that starts vLLM
exit status: that of COMMAND; 2 refused, in one sentence on standard error.
"""


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status unless the command takes this process over."""
    status = EXIT_OK
    _open_streams()
    try:
        try:
            status = _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has enough
        _discard_output()
    except ImportError as error:  # of what a command needs; the package itself is there
        say(f"kvoffload_patch: {sentence(error)}")
        return EXIT_REFUSED
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        _discard_output()
        say(
            f"kvoffload_patch: expected to write {error.filename or 'what was asked for'}, found "
            f"{error.strerror}; make room there, or have it written elsewhere."
        )
        return EXIT_REFUSED
    return status


def _discard_output() -> None:
    """What is still to be written is not; Python would try when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_streams() -> None:
    """Give what was started with `<&-`, `>&-` or `2>&-` the null device there, and COMMAND as well.

    Without a stream Python has None, which cannot be flushed, and the next file that is opened gets
    its number: what others write there comes to it, and who gives itself the null device loses it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):  # a name may have what its encoding lacks
            stream.reconfigure(errors="backslashreplace")


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    command: list[str] = arguments.command
    # As of a shell's variable that is not set.
    empty = [option(name) for name in VARIABLES if getattr(arguments, name, None) == ""]
    if empty:
        parser.error(f"{' and '.join(empty)}: expected a value, found an empty one; give one.")
    _set_variables(arguments)
    if arguments.json and not arguments.check:
        parser.error("expected --json beside --check or behind a command, found it alone; move it.")
    if command and command[0] in _OWN:
        return _own(command[0], command[1:])
    if command[:1] == ["--"]:
        del command[0]
    if not command and not arguments.check:
        parser.print_usage(sys.stderr)
        parser.error("expected a COMMAND to run, found none; give one (see `kvoffload --help`).")
    return _Launch(command, arguments.check, arguments.json).run()


def _own(name: str, argv: Sequence[str]) -> int:
    """A command of ours."""
    if name == "doctor":
        from kvoffload_patch.cli.doctor import command as doctor

        return doctor.main(argv)
    if name == "bench":
        from kvoffload_patch.cli.bench import command as bench

        return bench.main(argv)
    if name == "patch":
        from kvoffload_patch.cli import patch

        return patch.main(argv)
    if name == "top":
        from kvoffload_patch.cli import top

        return top.main(argv)
    if name == "status":
        from kvoffload_patch.cli import report

        return report.main(argv)
    from kvoffload_patch.cli import engines

    return engines.main(name, argv)


def _set_variables(arguments: argparse.Namespace) -> None:
    """Give options as variables, and say which, so that refusals name what the user has given."""
    options = {name: getattr(arguments, name) for name in VARIABLES if hasattr(arguments, name)}
    given = {name: text for name, text in options.items() if text is not None}
    os.environ.update(given)
    before = os.environ.get("KVOFFLOAD_OPTIONS", "").split(",")
    if given:
        os.environ["KVOFFLOAD_OPTIONS"] = ",".join(sorted({*filter(None, before), *given}))


class _Launch:
    """Decide and say so; then run the command, unless refused or only asked to check."""

    def __init__(self, command: list[str], check: bool, as_json: bool) -> None:
        self._command = command
        self._check = check
        self._as_json = as_json
        self._said: list[str] = []

    def run(self) -> int:
        """The exit status; with a command that runs, this process becomes it."""
        outcome = preflight.decide()
        resolved = launch.resolve(self._command) if self._command else []
        if outcome.refused:
            self._say(outcome.line + ("" if is_strict() else WITHOUT))
        if resolved is None:
            self._say(_unknown(self._command[0]))
        if resolved is None or (outcome.refused and is_strict()):
            return self._end(refused=True)
        if not outcome.refused:
            self._say(outcome.line)
        refused = outcome.refused or not (outcome.disabled or self._is_prepared(resolved))
        if self._check or (refused and is_strict()):
            return self._end(refused)
        if refused:
            os.environ["KVOFFLOAD_DISABLE"] = "1"
        armed = not refused and not outcome.disabled
        error = launch.replace_process(resolved, watched=armed and is_strict())
        self._say(
            f"kvoffload_patch: expected to run {resolved[0]}, found {error.strerror}; give a"
            " program that this system can run."
        )
        return EXIT_REFUSED

    def _is_prepared(self, resolved: list[str]) -> bool:
        """Whether the command's Python will run our start-up code; if not, that has been said."""
        try:
            if resolved:
                launch.prepare(resolved)
        except launch.NotArmed as reason:
            self._say(with_name(str(reason)) + ("" if is_strict() else WITHOUT))
            return False
        return True

    def _say(self, line: str) -> None:
        self._said.append(line)
        if not self._as_json:
            say(line)

    def _end(self, refused: bool) -> int:
        if self._as_json:
            found = {"version": __version__, "ok": not refused, "said": self._said}
            print(json.dumps(found, indent=1))
        return EXIT_REFUSED if refused else EXIT_OK


def _unknown(word: str) -> str:
    """The sentence for what is neither ours nor a program, with what may have been meant."""
    if os.path.isdir(word):
        return f"kvoffload_patch: expected a program to run, found {word}, a folder; correct it."
    if os.path.isfile(word):
        return (
            f"kvoffload_patch: expected a program to run, found {word}, which this user may not"
            " execute; make it executable (`chmod +x`), or name its interpreter before it."
        )
    near = difflib.get_close_matches(word, _OWN, n=1, cutoff=0.7)
    closest = f"; the closest command of kvoffload is {near[0]}" if near else ""
    if word == "serve":
        closest = ", such as `kvoffload vllm serve MODEL`"
    return (
        f"kvoffload_patch: {word!r} is neither beside {sys.executable} nor on PATH, expected a"
        f" program to run{closest}; correct it, or give its path."
    )


def _parser() -> Parser:
    epilog = f"{_EXAMPLES}\n{_variables()}"
    parser = Parser("kvoffload", _DESCRIPTION, epilog, _USAGE)
    for field, metavar in (("CPU_GIB", "GIB"), ("LOAD_MODE", "MODE"), ("LOG_INTERVAL", "SECONDS")):
        name = f"KVOFFLOAD_{field}"
        parser.add_argument(option(name), dest=name, metavar=metavar, help=f"sets {name}")
    parser.add_argument("--check", action="store_true", help="only report; exit 0 (fine) or 2")
    parser.add_argument("--json", action="store_true", help="with --check: one JSON object")
    parser.add_argument("--version", action="version", version=f"kvoffload_patch {__version__}")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _variables() -> str:
    """The table of variables, as the end of the help text."""
    words = {"None": "unset", "True": "on", "False": "off"}
    lines = ["environment variables (options win over them):"]
    for row in VARIABLES.values():
        if row.description.startswith("internal"):
            continue
        default = words.get(str(row.default), row.default)
        unit = f" {row.unit}" if row.unit and default != AUTO else ""
        lines += [f"  {row.name}: {row.expected} (default: {default}{unit})"]
        lines += [f"      {row.description}"]
    return "\n".join(lines)
