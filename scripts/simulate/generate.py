"""Writes a generated trace as JSON lines, one request each, in the form that `replay` reads."""

from __future__ import annotations

import argparse
import sys

from scripts.bench import arguments
from scripts.simulate import trace, workloads


def main() -> int:
    """Write one trace."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = parser.add_argument("name", choices=workloads.WORKLOADS)
    names.help = "; ".join(f"{name}: {what}" for name, (what, _) in workloads.WORKLOADS.items())
    parser.add_argument("out", type=arguments.target)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=arguments.positive, default=1800.0)
    options = parser.parse_args()
    requests = workloads.generate(options.name, options.seconds, options.seed)
    trace.write(options.out, requests)
    print(f"{len(requests)} requests", file=sys.stderr)
    return 0
