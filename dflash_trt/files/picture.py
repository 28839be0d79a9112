# SPDX-License-Identifier: Apache-2.0
"""PNG files of --plot, which say who drew them: only those are replaced."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dflash_trt import __version__
from dflash_trt.errors import BuildError
from dflash_trt.files.read import open_file
from dflash_trt.files.write import OutputKind, new_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHUNK = b"tEXtSoftware\0dflash-trt "  # PNG, 11.3.4.3: keyword, null, text; it stands before the image


def _is_ours(file: Path) -> bool:
    with open_file(file, BuildError) as stream:
        return CHUNK in stream.read(4096)


PICTURE = OutputKind(name="a picture that dflash-trt drew", recognizes=_is_ours, form="file", option="--plot FILE")


def save_picture(figure: Figure, file: Path) -> None:
    """Writes a PNG; raises BuildError where `file` is no picture of ours, or cannot be written."""
    with new_file(file, PICTURE, force=True) as new:
        figure.savefig(new, format="png", metadata={"Software": f"dflash-trt {__version__}"})
