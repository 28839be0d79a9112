# SPDX-License-Identifier: Apache-2.0
"""How methods are called and told apart in tables and pictures: by name, colour, dash and mark."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

TITLES = {"none": "plain", "eagle3": "EAGLE-3", "dflash": "DFlash"}


class Style(msgspec.Struct, frozen=True):
    """Of one curve; colours are Okabe and Ito's, which colour-blind people tell apart."""

    color: str
    dark: str
    """The colour on a dark ground."""
    dash: str
    """SVG's stroke-dasharray; '' is a solid line."""
    mark: str
    """One of `axes.MARKS`."""


STYLES = {
    "none": Style("#666666", "#b0b0b0", "7 4", "square"),
    "eagle3": Style("#b34700", "#f0a060", "2 4", "triangle"),
    "dflash": Style("#0065a3", "#6cc0f5", "", "circle"),
}
MORE = (
    Style("#00795a", "#4fd0ab", "10 3 2 3", "diamond"),
    Style("#9c4a7e", "#e3a0c9", "4 2", "cross"),
    Style("#7a6400", "#e6cf5a", "1 3", "square"),
    Style("#3d3d9e", "#a5a5f0", "12 4", "triangle"),
)


def styles(methods: Sequence[str]) -> list[Style]:
    """One for each, in their order; those beyond the palette repeat it."""
    free = [style for name, style in STYLES.items() if name not in methods]
    rest = iter([*MORE, *free] * (len(methods) + 1))
    return [STYLES[method] if method in STYLES else next(rest) for method in methods]
