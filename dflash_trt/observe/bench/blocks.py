# SPDX-License-Identifier: Apache-2.0
"""What a page is made of, for Markdown and HTML alike."""

from __future__ import annotations

import msgspec


class Heading(msgspec.Struct, frozen=True):
    """1 is the page's."""

    text: str
    level: int = 2


class Paragraph(msgspec.Struct, frozen=True):
    """Plain text."""

    text: str


class Listing(msgspec.Struct, frozen=True):
    """Bullets."""

    items: tuple[str, ...]


class Table(msgspec.Struct, frozen=True):
    """The first `texts` columns are texts, the others numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    texts: int = 1


class Picture(msgspec.Struct, frozen=True):
    """`file` lies beside the page; a page of one file has `svg` in it."""

    file: str
    svg: str
    alt: str


Block = Heading | Paragraph | Listing | Table | Picture
