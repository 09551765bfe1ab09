"""vLLM's command line whose engine cores are forked: ``python forked_server.py serve MODEL ...``.

Each would be spawned, and import vLLM once more.
"""

from __future__ import annotations

import sys

import driver

driver.before_vllm()

if __name__ == "__main__":
    driver.run_command(sys.argv[1:])
