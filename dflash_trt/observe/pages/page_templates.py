# SPDX-License-Identifier: Apache-2.0
"""Templates as HTML in one file (no script, nothing loaded, light and dark) and as Markdown.

A template of templates/ is written once, with the macros of html.j2 or markdown.j2 as `page`.
"""

from __future__ import annotations

import base64
import re
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from dflash_trt import __version__
from dflash_trt.errors import printable
from dflash_trt.files.write import OutputKind, bearing

if TYPE_CHECKING:
    from jinja2 import Environment


GENERATOR = '<meta name="generator" content="dflash-trt">'
PAGE = OutputKind(name="a page that dflash-trt wrote", recognizes=bearing(GENERATOR), form="file", option="--html FILE")


def render(template: str, style: Literal["html", "markdown"], **values: object) -> str:
    """The page; every text in `values` is escaped for where it stands."""
    text = _environment().get_template(template).render(
        values, format=style, generator=GENERATOR, version=__version__
    )  # fmt: skip
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"printable": printable, "markdown": _markdown, "data_url": _data_url}
    return environment


def _markdown(text: str) -> object:
    """On one line, without what Markdown or HTML would obey."""
    from markupsafe import Markup

    shown = escape(printable(text).replace("\n", " "), quote=False).replace("\\", "\\\\")
    return Markup(re.sub(r"([|*_`\[\]])", r"\\\1", shown))  # noqa: S704  # escaped above


def _data_url(svg: str) -> str:
    """A picture inside a page, whose names and styles stay its own."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Cells are texts; the first `num_text_columns` columns are left-aligned, the others are numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_text_columns: int = 1
