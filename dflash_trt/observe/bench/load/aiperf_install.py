# SPDX-License-Identifier: Apache-2.0
"""Finds AIPerf, a program of the extra `aiperf` or of another environment."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from dflash_trt.errors import MissingDependencyError, cut

VERSION = "0.13.0"
"""Release whose exports `aiperf_export` reads."""
INSTALL = "pip install 'dflash-trt[aiperf]'; --aiperf FILE takes that of another environment"


def find_aiperf(program: Path | None) -> Path:
    """`program`, or the one on PATH; raises MissingDependencyError without release VERSION."""
    if program is None and (on_path := shutil.which("aiperf")) is not None:
        program = Path(on_path)
    if program is None:
        raise MissingDependencyError(f"bench run needs AIPerf {VERSION}, and no aiperf is on PATH", hint=INSTALL)
    words: list[str] = []
    with suppress(OSError, subprocess.SubprocessError, UnicodeDecodeError):
        words = subprocess.run(  # noqa: S603  # the program that the user names
            [str(program), "--version"], capture_output=True, text=True, timeout=120, check=True
        ).stdout.split()
    if words[-1:] != [VERSION]:
        raise MissingDependencyError(
            f"{program}: expected aiperf {VERSION}, found {cut(words[-1]) if words else 'no version'}", hint=INSTALL
        )
    return program.absolute()
