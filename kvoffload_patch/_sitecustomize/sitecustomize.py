"""Door for environments whose start-up file is not processed: this folder is on PYTHONPATH.

Keep this file small; what it does lies in `kvoffload_patch._bootstrap`. Python imports one
`sitecustomize` only, so the one this file shadows is run here. Its failure is not caught: it takes
the same way out as it would without this file.
"""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _arm() -> None:
    """Run the start-up code; the package lies two folders up if nothing else finds it."""
    if importlib.util.find_spec("kvoffload_patch") is None:
        sys.path.append(os.path.dirname(os.path.dirname(_HERE)))
    try:
        from kvoffload_patch._bootstrap import main
    except ImportError as error:
        print(
            f"kvoffload_patch: the package cannot be imported ({error});"
            " reinstall it or remove its _sitecustomize from PYTHONPATH.",
            file=sys.stderr,
        )
    else:
        main()


def _run_shadowed() -> None:
    """Run the next `sitecustomize` on sys.path in this one's place, and leave sys.path to it."""
    folders = [os.path.abspath(entry) for entry in sys.path]
    following = sys.path[folders.index(_HERE) + 1 :] if _HERE in folders else sys.path[:]
    sys.path[:] = [e for e, folder in zip(sys.path, folders) if folder != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", following)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_arm()
_run_shadowed()
