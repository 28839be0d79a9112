# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.site build/docs` writes the pages that `zensical build` makes a site of (`make docs`)."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tools.site.command_reference import command_reference
from tools.site.pages import PAGES, REPOSITORY, page, signed
from tools.site.python_reference import python_reference


def write(directory: Path) -> None:
    """Replaces `directory`: docs/ with its pictures, the pages that lie outside it, and the two references."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(REPOSITORY / "docs", directory)
    for source in [*PAGES, *(f"docs/{file.name}" for file in sorted((REPOSITORY / "docs").glob("*.md")))]:
        (directory / PAGES.get(source, Path(source).name)).write_text(page(source))
    (directory / "commands.md").write_text(signed(command_reference(), "dflash_trt/cli/"))
    (directory / "python.md").write_text(signed(python_reference(), "dflash_trt/"))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
