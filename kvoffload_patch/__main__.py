"""`python -m kvoffload_patch`: see `kvoffload_patch.cli`."""

from __future__ import annotations

import sys

from kvoffload_patch.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
