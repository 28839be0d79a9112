# SPDX-License-Identifier: Apache-2.0
"""Where AIPerf is: given, on PATH, or in an environment of its own, because it pins what we do not.

https://github.com/ai-dynamo/aiperf; the release whose exports `aiperf_export` reads is VERSION.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dflash_trt.errors import DFlashError, MissingDependencyError, cut

VERSION = "0.13.0"
INSTALLED = "installed"  # written last: without it the environment was left half-made
HINT = f"in an environment of its own: pip install aiperf=={VERSION}; then --aiperf PATH_TO/bin/aiperf"


def find_aiperf(given: Path | None, say: Callable[[str], None]) -> Path:
    """Its program, installed if need be; `say` tells people what takes long.

    Raises MissingDependencyError where it is another release, or cannot be installed.
    """
    if given is not None:
        if (found := _version(given)) != VERSION:
            raise MissingDependencyError(f"{given}: expected aiperf {VERSION}, found {found or 'none'}", hint=HINT)
        return given.absolute()
    on_path = shutil.which("aiperf")
    if on_path is not None:
        if (found := _version(Path(on_path))) == VERSION:
            return Path(on_path)
        say(f"{on_path} is aiperf {found or 'of no version'}; {VERSION} is what is read here")
    return _own_environment(say)


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/dflash-trt, or ~/.cache/dflash-trt."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash-trt"


def _own_environment(say: Callable[[str], None]) -> Path:
    folder = cache_folder() / f"aiperf-{VERSION}"
    program = folder / "bin" / "aiperf"
    if (folder / INSTALLED).exists():
        return program
    say(f"installing aiperf {VERSION} into {folder}, once")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        _run(sys.executable, "-m", "venv", str(folder))
        _run(str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", f"aiperf=={VERSION}")
        (folder / INSTALLED).touch()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return program


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # our own words
    if result.returncode:
        lines = [line for line in (result.stderr or result.stdout).splitlines() if line.startswith("ERROR")]
        said = lines[-1] if lines else f"exit code {result.returncode}"
        raise MissingDependencyError(f"expected to install aiperf {VERSION}, found: {cut(said)}", hint=HINT)


def _version(program: Path) -> str | None:
    with suppress(OSError, subprocess.TimeoutExpired, DFlashError):
        command = [str(program), "--version"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)  # noqa: S603
        words = result.stdout.split()
        return words[-1] if result.returncode == 0 and words else None
    return None
