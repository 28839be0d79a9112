# SPDX-License-Identifier: Apache-2.0
"""One-file pages: no script, nothing loaded, light and dark; only those that we wrote are replaced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from dflash_trt.errors import BuildError
from dflash_trt.files.read import open_file
from dflash_trt.files.write import OutputKind

CSS = Path(__file__).parent / "page.css"
GENERATOR = '<meta name="generator" content="dflash-trt">'


def _is_ours(file: Path) -> bool:
    with open_file(file, BuildError) as stream:
        return GENERATOR.encode() in stream.read(4096)


PAGE = OutputKind(name="a page that dflash-trt wrote", recognizes=_is_ours, form="file", option="--html FILE")


def document(title: str, body: str) -> str:
    """The whole page; `body` is HTML."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport"'
        f' content="width=device-width">{GENERATOR}<title>{escape(title)}</title>'
        f"<style>{CSS.read_text()}</style></head>\n<body>{body}</body></html>\n"
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """A table whose first `texts` columns are texts, and the others numbers."""

    def cells(tag: str, values: Sequence[str]) -> str:
        kinds = ["" if index < texts else ' class="number"' for index in range(len(values))]
        return "".join(f"<{tag}{kind}>{escape(v)}</{tag}>" for v, kind in zip(values, kinds, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{cells("th", columns)}</tr>{body}</table></div>'
