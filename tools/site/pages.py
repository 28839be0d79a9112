# SPDX-License-Identifier: Apache-2.0
"""Pages of the repository as the site shows them: links between pages lead there, links to sources become paths."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import join, normpath

from dflash_trt import __version__

REPOSITORY = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md", "CHANGELOG.md": "changelog.md", "benchmarks/RESULTS.md": "results.md",
    "plugins/README.md": "plugins.md", "findings/README.md": "findings.md", "SECURITY.md": "security.md",
    ".github/CONTRIBUTING.md": "contributing.md",
}  # fmt: skip
"""Pages outside docs/, by their name on the site."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:)([^)#\s]+)(#[^)\s]*)?\)")
COMMAND = re.compile(r"^\| (`[a-z`, -]+`) \|", re.MULTILINE)


def page(source: str) -> str:
    """The page of a file of the repository; README's table of commands links to the reference."""
    text = (REPOSITORY / source).read_text(encoding="utf-8")
    folder = Path(source).parent.as_posix()
    if source == "README.md":
        text = COMMAND.sub(lambda row: "| " + re.sub(r"`([a-z-]+)`", r"[`\1`](commands.md#\1)", row[1]) + " |", text)
        folder, text = ".", text.replace("](commands.md#", "](docs/commands.md#")
    return signed(LINK.sub(lambda link: _on_site(link, folder), text), source)


def signed(text: str, source: str) -> str:
    """`text` with the version, and what to edit in a checkout, at its end."""
    return f'{text.rstrip()}\n\n<p class="source">dflash-trt {__version__}, <code>{source}</code></p>\n'


def _on_site(link: re.Match[str], folder: str) -> str:
    image, text, target, anchor = link.groups(default="")
    path = normpath(join(folder, target))
    if path in PAGES or (path.startswith("docs/") and not (REPOSITORY / path).is_dir()):
        return f"{image}[{text}]({PAGES.get(path, path.removeprefix('docs/'))}{anchor})"
    if path.startswith("findings/"):
        return f"[{text}](findings.md)"
    name = Path(path).name
    is_named = path in text or ("." in name and name in text)
    return text if is_named else f"{text} (`{path}`)"
