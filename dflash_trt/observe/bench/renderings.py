# SPDX-License-Identifier: Apache-2.0
"""Blocks as Markdown, and as one page that loads nothing."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from dflash_trt.errors import printable
from dflash_trt.observe.bench.blocks import Block, Heading, Listing, Paragraph, Picture
from dflash_trt.observe.plots.page_parts import document, table


def markdown(blocks: Iterable[Block]) -> str:
    """GitHub's."""
    return "\n".join(_markdown(block) for block in blocks)


def _markdown(block: Block) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {_text(block.text)}\n"
    if isinstance(block, Paragraph):
        return f"{_text(block.text)}\n"
    if isinstance(block, Listing):
        return "".join(f"* {_text(item)}\n" for item in block.items)
    if isinstance(block, Picture):
        return f"![{_text(block.alt)}]({block.file})\n"
    rules = ["---" if index < block.texts else "---:" for index in range(len(block.columns))]
    rows = [tuple(map(_text, block.columns)), rules, *(tuple(map(_text, row)) for row in block.rows)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _text(text: str) -> str:
    """On one line, without what Markdown or HTML would obey."""
    shown = escape(printable(text).replace("\n", " "), quote=False).replace("\\", "\\\\")
    for mark in "|*_`[]":
        shown = shown.replace(mark, f"\\{mark}")
    return shown


def page(title: str, blocks: Iterable[Block]) -> str:
    """HTML."""
    return document(title, "\n".join(_html(block) for block in blocks))


def _html(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{_escaped(block.text)}</h{block.level}>"
    if isinstance(block, Paragraph):
        return f'<p class="soft">{_escaped(block.text)}</p>'
    if isinstance(block, Listing):
        return f"<ul>{''.join(f'<li>{_escaped(item)}</li>' for item in block.items)}</ul>"
    if isinstance(block, Picture):
        return block.svg
    rows = [tuple(map(printable, row)) for row in block.rows]
    return table(tuple(map(printable, block.columns)), rows, block.texts)


def _escaped(text: str) -> str:
    return escape(printable(text))
