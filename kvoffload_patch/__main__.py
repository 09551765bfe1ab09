"""`python -m kvoffload_patch`, and the script `kvoffload`: see `kvoffload_patch.cli`."""

from __future__ import annotations

import sys

EXIT_REFUSED, EXIT_INTERRUPTED = 2, 130  # as a shell has it for SIGINT


def main() -> int:
    """Run the command line; Ctrl-C, which may come while it is imported, ends it with no word."""
    try:
        return _run()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _run() -> int:
    """The same, or say in a sentence that the package is damaged."""
    try:
        from kvoffload_patch.cli.main import main as run
    except (ImportError, SyntaxError) as error:
        print(
            f"kvoffload_patch: the package cannot be imported by {sys.executable} ({error});"
            " reinstall it there.",
            file=sys.stderr,
        )
        return EXIT_REFUSED
    return run()


if __name__ == "__main__":
    sys.exit(main())
