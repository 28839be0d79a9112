# SPDX-License-Identifier: Apache-2.0
"""Published speed-ups of DFlash by row, beside which `bench report --beside` puts a run."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from dflash_trt.files.json_file import package_data


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One method in one published row."""

    speedup: float
    """Relative to decoding without speculation."""
    tau: float | None = None
    """Acceptance length; None where the row has none."""


class PublishedRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of a published table."""

    table: str
    target: str
    prompts: str
    task: str | None
    """Prompt set of `bench run` with these prompts; None where it has none."""
    category: str | None = None
    """Category of that set; None for all prompts."""
    concurrency: int | None
    """Requests at once; None where it is not stated."""
    where: str
    """Runtime and GPUs, as far as they are stated."""
    thinking: bool | None = None
    """Whether the target thinks; None where it is not stated."""
    temperature: float = 0
    dflash: Figures
    eagle3: dict[str, Figures] = {}
    """EAGLE-3's columns, by its draft."""
    mtp: Figures | None = None
    """The target's own multi-token prediction."""
    rates: tuple[float, float] | None = None
    """Output tokens/s without speculation and with DFlash."""

    def figures(self) -> dict[tuple[str, str], Figures]:
        """By method and the name of its column; EAGLE-3 has several."""
        eagle3 = {("eagle3", draft): each for draft, each in self.eagle3.items()}
        return {("dflash", ""): self.dflash, **({} if self.mtp is None else {("mtp", ""): self.mtp}), **eagle3}


class PublishedSet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rows of one source."""

    title: str
    note: str
    """Rows and facts of the source that are missing here."""
    rows: tuple[PublishedRow, ...]


@cache
def published_sets() -> dict[str, PublishedSet]:
    """The package's data, by the name that --beside takes."""
    return package_data(Path(__file__).with_suffix(".json"), dict[str, PublishedSet])
