# SPDX-License-Identifier: Apache-2.0
"""The command line: stdout is data, stderr is talk.

Exit codes: 0 done, 1 the user can fix it, 2 usage, 70 our bug.
"""

from __future__ import annotations

import signal
import sys
import traceback
from types import FrameType
from typing import NoReturn

import click

from dflash_trt import __version__
from dflash_trt.cli.build import build
from dflash_trt.cli.capture import capture
from dflash_trt.cli.doctor import doctor
from dflash_trt.cli.estimate import estimate
from dflash_trt.cli.generate import generate
from dflash_trt.cli.inspect import inspect
from dflash_trt.cli.quantize import quantize
from dflash_trt.cli.serve import serve
from dflash_trt.cli.serve_config import serve_config
from dflash_trt.cli.triton_repo import triton_repo
from dflash_trt.cli.tune import tune
from dflash_trt.cli.verify import verify
from dflash_trt.errors import DFlashError, MissingDependencyError, printable

# The extra of pyproject.toml that brings a module.
EXTRAS = {
    "onnx": "build",
    "onnxruntime": "run",
    "torch": "run",
    "transformers": "run",
    "accelerate": "run",
    "safetensors": "run",
    "modelopt": "calibrate",
    "requests": "calibrate",
    "matplotlib": "plot",
    "tritonclient": "triton",
    "google": "triton",
    "starlette": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dflash-trt")
def cli() -> None:
    """DFlash speculative decoding: from a draft checkpoint to engines, configs and lossless text."""


for command in (
    inspect,
    capture,
    quantize,
    build,
    generate,
    verify,
    serve,
    serve_config,
    estimate,
    tune,
    triton_repo,
    doctor,
):
    cli.add_command(command)


def main() -> NoReturn:
    """Entry point of `dflash-trt` and `python -m dflash_trt`."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        cli.main(prog_name="dflash-trt", standalone_mode=True)
    except DFlashError as error:
        _fail(error)
    except ModuleNotFoundError as error:
        if error.name == "dflash_trt._C":
            _fail(
                MissingDependencyError(
                    "expected the compiled module dflash_trt._C, found it not built",
                    hint="in the source directory: pip install -e .",
                )
            )
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS:
            _report_bug()
        _fail(
            MissingDependencyError(
                f"expected the package {module}, found it not installed",
                hint=f"pip install 'dflash-trt[{EXTRAS[module]}]'",
            )
        )
    except OSError as error:  # what no reader or writer put into better words
        where = f"{error.filename}: " if error.filename else ""
        _fail(DFlashError(f"{where}expected to read or write, found: {error.strerror or error}"))
    except Exception:
        _report_bug()
    raise AssertionError("click's standalone mode exits")


def _terminate(signal_number: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM unwinds the stack, so that half-written directories are removed."""
    sys.exit(128 + signal_number)


def _fail(error: DFlashError) -> NoReturn:
    click.echo(f"error: {error.message}", err=True)
    if error.hint:
        click.echo(f"\nhint: {error.hint}", err=True)
    sys.exit(1)


def _report_bug() -> NoReturn:
    click.echo(printable(traceback.format_exc()), nl=False, err=True)
    click.echo("\nerror: this is a bug in dflash-trt; please report it with the lines above", err=True)
    sys.exit(70)
