"""python scripts/bench page [--check]

Makes the tables of docs/performance.md, docs/measurements.md and docs/mechanisms.md, the picture of
the first and the short table of README.md from the results in docs/measured/current. The words
around the tables are written by hand; a table stands between two comments that name it. With
--check nothing is written, and status 1 says that a page is not what the results say.
"""

from __future__ import annotations

import argparse
import re

from scripts.bench import tables
from scripts.bench.common import ROOT, say
from scripts.bench.serve import report as serve

DOCS = ROOT / "docs"
README = ROOT / "README.md"
_NAMES = ("performance.md", "measurements.md", "mechanisms.md", "history.md")
PAGES = (*(DOCS / name for name in _NAMES), README)
PICTURE = DOCS / "performance.png"


def filled(text: str) -> str:
    """The page with every table that it has made from the results."""
    for name, make in tables.TABLES.items():
        begin, end = f"<!-- table: {name} -->", f"<!-- end: {name} -->"
        if begin not in text or (content := make()) is None:
            continue
        made = f"{begin}\n{content}\n{end}"
        text = re.sub(
            re.escape(begin) + ".*?" + re.escape(end), lambda _, m=made: m, text, flags=re.S
        )
    return text


def draw() -> None:
    """The picture: S1 and S3 by mode."""
    document = tables.read("serve.json")
    if document is not None:
        jobs = [{**job, "mode": tables.MODES[job["mode"]]} for job in document["jobs"]]
        serve.draw({**document, "jobs": jobs}, PICTURE)


def main() -> int:
    """Write the pages, or say whether they are right."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[1])
    parser.add_argument("--check", action="store_true", help="write nothing; status 1: not right")
    options = parser.parse_args()
    pages = {page: page.read_text() for page in PAGES}
    wrong = [page.name for page, text in pages.items() if filled(text) != text]
    if options.check:
        say(f"not what the results say: {wrong}" if wrong else "as the results say")
        return int(bool(wrong))
    for page, text in pages.items():
        page.write_text(filled(text))
    draw()
    return 0
