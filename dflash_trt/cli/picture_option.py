# SPDX-License-Identifier: Apache-2.0
"""--plot: what would stop the picture is said before the work, not after it."""

from __future__ import annotations

from pathlib import Path

import click

from dflash_trt.files.picture import PICTURE
from dflash_trt.files.write import check_replaceable


def check_picture(file: Path | None) -> None:
    """Raises UsageError, BuildError or ModuleNotFoundError where no PNG can be drawn into `file`."""
    if file is None:
        return
    if file.suffix != ".png" or not file.parent.is_dir():
        raise click.UsageError(f"--plot: expected a .png file in an existing directory, found {file}")
    check_replaceable(file, PICTURE, force=True)
    import matplotlib  # noqa: F401 - it is used once the work is done
