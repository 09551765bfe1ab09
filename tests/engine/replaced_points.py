"""Another package that replaces a function of vLLM's as soon as its module is imported.

TEST_REPLACED is ``MODULE:CLASS.METHOD``; with ``children:`` before it, in processes below this one
alone, which must be forked.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import wrapt


def install() -> None:
    """Before vLLM is imported, so that this is done before anything is patched."""
    target = os.environ["TEST_REPLACED"].removeprefix("children:")
    module, _, attribute = target.partition(":")
    begun, alone = os.getpid(), target != os.environ["TEST_REPLACED"]

    def replace(found: ModuleType) -> None:
        if alone and os.getpid() == begun:
            return
        owner, name, as_made = wrapt.resolve_path(found, attribute)

        def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
            return as_made(self, *args, **kwargs)

        setattr(owner, name, theirs)

    wrapt.register_post_import_hook(replace, module)
