"""What a vLLM release needs to be supported: python scripts/release COMMAND; see --help."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])  # not this folder, whose names hide others

from scripts import dispatch  # noqa: E402

COMMANDS = {
    "add": ("add", "add a release that the patch table fits, with all that is kept of it"),
    "snapshot": ("snapshot", "write what releases have at the patch points: tests/data/vllm"),
    "digests": ("digests", "write what was verified of releases, into the package"),
    "ascend": ("ascend", "write what releases of vllm-ascend have, read from a clone of it"),
    "time": ("decision", "how long the decision about the installed vLLM takes"),
    "sources": ("sources", "fetch the Python sources of releases"),
    "patches": ("patches", "make the files in patches/"),
    "compatibility": ("compatibility", "make docs/compatibility.md from the matrix's results"),
}

if __name__ == "__main__":
    sys.exit(dispatch("release", "Reads vLLM releases; writes the files kept of them.", COMMANDS))
