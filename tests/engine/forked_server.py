"""vLLM's command line whose engine cores are forked: ``python forked_server.py serve MODEL ...``.

Each would be spawned, and import vLLM once more. API servers are: vLLM leaves no choice there, and
they import this module first.
TEST_LATE: how late copies happen, see `late_copies`. TEST_HANG: see `hung_copies`.
"""

from __future__ import annotations

import os

import driver

driver.before_vllm()


def main() -> None:
    """Run the command line of this process."""
    late = int(os.environ.get("TEST_LATE", "0"))
    if late:
        import late_copies

        late_copies.install(late)
    if "TEST_HANG" in os.environ:
        import hung_copies

        hung_copies.install()
    driver.change_platform(async_scheduling=False, fork_workers=True)
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ == "__main__":
    main()
