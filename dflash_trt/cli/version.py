# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt --version`: release, commit, and the GPUs that the compiled kernels are for."""

from __future__ import annotations

import subprocess
from pathlib import Path

import click

import dflash_trt
from dflash_trt.errors import DFlashError
from dflash_trt.files.read import read_text

PACKAGE = Path(dflash_trt.__file__).parent
NO_KERNELS = "none: built without nvcc; make test-gpu compiles them in a clone"


def print_version(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
    """Callback of --version; exits."""
    if is_asked:
        click.echo(f"dflash-trt, version {dflash_trt.__version__}\ncommit: {commit()}\nkernels: {kernels()}")
        ctx.exit()


def commit(package: Path = PACKAGE) -> str:
    """Commit of a checkout (12 digits, with `-dirty` if changed), or the one recorded in an installed package."""
    if not (package.parent / ".git").exists():
        recorded = package / "commit"
        text = read_text(recorded, DFlashError, limit=64) if recorded.is_file() else ""
        return text.strip() or "not recorded by the build"
    command = ["git", "-C", str(package.parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)  # noqa: S603
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        return f"not known: {error}"
    return done.stdout.strip() or f"not known: {done.stderr.strip()}"


def kernels() -> str:
    """`SM 8.0, 9.0a, PTX for 9.0 and later`, or why there are none."""
    try:
        from dflash_trt import _C
    except ImportError as error:
        return f"none: {error}"
    return ", ".join(map(_in_words, _C.cuda_architectures())) or NO_KERNELS


def _in_words(architecture: str) -> str:
    """An architecture as nvcc names it, "100f" or "90-virtual"."""
    digits = architecture.removesuffix("-virtual").rstrip("af")
    letter = architecture.removesuffix("-virtual")[len(digits) :]
    sm = f"{digits[:-1]}.{digits[-1]}{letter}"
    return f"PTX for SM {sm} and later" if architecture.endswith("-virtual") else f"SM {sm}"
