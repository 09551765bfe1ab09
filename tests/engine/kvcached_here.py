"""kvcached from a folder, as if it were installed: its start-up file is run before vLLM comes."""

from __future__ import annotations

import os
import site


def install() -> None:
    """The folder is that of TEST_KVCACHED, into which pip has installed kvcached."""
    site.addsitedir(os.environ["TEST_KVCACHED"])
