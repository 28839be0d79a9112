# SPDX-License-Identifier: Apache-2.0
"""Titles and styles of the compared methods."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

TITLES = {"none": "plain", "eagle3": "EAGLE-3", "mtp": "MTP", "ngram": "n-gram", "dflash": "DFlash"}


def title_of(method: str) -> str:
    """Name of a method in tables and pictures."""
    return TITLES.get(method, method)


class Style(msgspec.Struct, frozen=True):
    """Style of a curve in matplotlib's terms; Okabe and Ito's colours, which colour-blind people tell apart."""

    color: str
    marker: str
    dashes: tuple[float, ...] = ()
    """Lengths of dashes and gaps in line widths; none: a solid line."""

    def line(self) -> dict[str, object]:
        return {"color": self.color, "marker": self.marker, "linestyle": (0, self.dashes) if self.dashes else "-"}


STYLES = {
    "none": Style("#666666", "s", (3.2, 1.8)),
    "eagle3": Style("#b34700", "^", (0.9, 1.8)),
    "mtp": Style("#00795a", "D", (4.5, 1.4, 0.9, 1.4)),
    "ngram": Style("#9c4a7e", "X", (1.8, 0.9)),
    "dflash": Style("#0065a3", "o"),
}
MORE = (
    Style("#7a6400", "s", (0.5, 1.4)),
    Style("#3d3d9e", "^", (5.5, 1.8)),
)


def styles(methods: Sequence[str]) -> list[Style]:
    """One style per curve, in order; the palette repeats."""
    free = [style for name, style in STYLES.items() if name not in methods]
    rest = iter([*MORE, *free] * (len(methods) + 1))
    return [STYLES[method] if method in STYLES else next(rest) for method in methods]
