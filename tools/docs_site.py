# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs.yml (`make docs`): pages that lie outside docs/ join the site, links to sources become text."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import join, normpath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md", "CHANGELOG.md": "changelog.md", "benchmarks/RESULTS.md": "results.md",
    "plugins/README.md": "plugins.md", ".github/CONTRIBUTING.md": "contributing.md",
}  # fmt: skip
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds PAGES under their names on the site."""
    from mkdocs.structure.files import File

    for source, name in PAGES.items():
        files.append(File.generated(config, name, content=(REPOSITORY / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with its relative links turned from the repository's layout to the site's."""
    name = page.file.src_uri
    source = next((file for file, site in PAGES.items() if site == name), f"docs/{name}")
    return LINK.sub(lambda link: _on_site(link, Path(source).parent.as_posix()), markdown)


def _on_site(link: re.Match[str], folder: str) -> str:
    image, text, target, anchor = link.groups(default="")
    path = normpath(join(folder, target))
    if path in PAGES or (path.startswith("docs/") and not (REPOSITORY / path).is_dir()):
        return f"{image}[{text}]({PAGES.get(path, path.removeprefix('docs/'))}{anchor})"
    return text
