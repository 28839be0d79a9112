# SPDX-License-Identifier: Apache-2.0
"""A table as a value: a terminal, a page and a Markdown file show the same."""

from __future__ import annotations

import msgspec


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Cells are texts; the first `num_text_columns` columns are left-aligned, the others are numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_text_columns: int = 1
