"""What mkdocs calls: pages beside docs/ become pages of the site, and links follow them."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parents[2]
# Files of the repository, and their names below docs/ as the site has them.
PAGES = {
    "README.md": "project/readme.md",
    "SECURITY.md": "project/security.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "patches/README.md": "project/patches.md",
}
_LINK = re.compile(r"(\]\()([^):#\s]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    from mkdocs.structure.files import File

    for source, name in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Write each link as it is seen from the page's place in the site."""
    return relinked(markdown, page.file.src_uri)


def relinked(markdown: str, name: str) -> str:
    """The text of a page with links as the site has them.

    Args:
        name: of the page, below docs/ in the site.
    """
    sources = {site: source for source, site in PAGES.items()}
    here = posixpath.dirname(sources.get(name, f"docs/{name}"))

    def link(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(here, found[2]))
        target = PAGES.get(path) or path.removeprefix("docs/")
        if target == path:  # it is in neither: left to mkdocs, which warns of it
            return found[0]
        return found[1] + posixpath.relpath(target, posixpath.dirname(name) or ".") + found[3]

    return _LINK.sub(link, markdown)
