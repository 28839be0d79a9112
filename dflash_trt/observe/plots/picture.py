# SPDX-License-Identifier: Apache-2.0
"""PNG files of --plot, marked as ours: only marked files are replaced."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dflash_trt import __version__
from dflash_trt.errors import BuildError
from dflash_trt.files.read import open_file
from dflash_trt.files.write import OutputKind, new_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CHUNK = b"tEXtSoftware\0dflash-trt "  # PNG, 11.3.4.3: keyword, null, text; it stands before the image


# Okabe and Ito's palette; lines differ in marker and dash too.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#666666"


def plain_axes(axes: Axes, x_label: str, y_label: str) -> None:
    """Labels, and a light grid behind the lines, without a frame."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _is_ours(file: Path) -> bool:
    with open_file(file, BuildError) as stream:
        return CHUNK in stream.read(4096)


PICTURE = OutputKind(name="a picture that dflash-trt drew", recognizes=_is_ours, form="file", option="--plot FILE")


def save_picture(figure: Figure, file: Path) -> None:
    """Writes a PNG; raises BuildError if `file` is another file, or cannot be written."""
    with new_file(file, PICTURE, force=True) as new:
        figure.savefig(new, format="png", metadata={"Software": f"dflash-trt {__version__}"})
