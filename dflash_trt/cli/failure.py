# SPDX-License-Identifier: Apache-2.0
"""Failure of a command: one line on stderr, and with --json one document on stdout."""

from __future__ import annotations

import os
import sys
import traceback

import click

from dflash_trt.cli import output
from dflash_trt.errors import DFlashError, MissingDependencyError, cut, printable

# The extra of pyproject.toml that brings a module.
EXTRAS = {
    "onnxruntime": "run",
    "torch": "run",
    "transformers": "run",
    "accelerate": "run",
    "safetensors": "run",
    "modelopt": "calibrate",
    "requests": "calibrate",
    "matplotlib": "observe",
    "tritonclient": "triton",
    "google": "triton",
    "starlette": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
    "httpx2": "observe",
    "jinja2": "observe",
    "pyarrow": "observe",
}
PACKAGES = {"google": "protobuf", "modelopt": "nvidia-modelopt"}
"""Names of packages that differ from their modules."""


def fail(error: DFlashError) -> int:
    """Reports an error that the user can fix; returns the exit code."""
    hint = error.hint or help_hint()
    click.echo(f"error: {error.message}", err=True)
    click.echo(f"\nhint: {hint}", err=True)
    _print_document(error.message, hint)
    return 1


def help_hint() -> str:
    """The next command after an error that suggests none: the help of the command that runs."""
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    command = words[: 2 if words[:1] == ["bench"] else 1]
    return f"{' '.join(['dflash-trt', *command])} --help shows what it takes, with an example"


def fail_usage(error: click.ClickException) -> int:
    """Reports what click refuses: mostly wrong options."""
    error.show()
    _print_document(error.format_message(), None)
    return error.exit_code


def broken_package(error: BaseException) -> str | None:
    """Module in EXTRAS whose import raised `error`; None where none was being imported, or one is not installed."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in EXTRAS:
        return None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if frame.f_code.co_name == "<module>" and name in EXTRAS:
            return name
    return None


def fail_broken(module: str, error: BaseException) -> int:
    """Reports a package that is installed but cannot be imported."""
    return fail(
        MissingDependencyError(
            f"the installed package {PACKAGES.get(module, module)} cannot be imported: {type(error).__name__}:"
            f" {cut(str(error))}",
            hint=f"install it again: pip install --force-reinstall 'dflash-trt[{EXTRAS[module]}]'",
        )
    )


def fail_import(error: ModuleNotFoundError) -> int:
    """Reports a missing package of an extra; any other missing module is our bug."""
    if error.name == "dflash_trt._C":
        hint = "in the source directory: pip install -e ."
        return fail(MissingDependencyError("the compiled module dflash_trt._C is not built", hint=hint))
    module = (error.name or "").partition(".")[0]
    if module not in EXTRAS:
        return report_bug()
    return fail(
        MissingDependencyError(
            f"missing package {PACKAGES.get(module, module)}", hint=f"pip install 'dflash-trt[{EXTRAS[module]}]'"
        )
    )


def fail_interrupted() -> int:
    """Reports Ctrl-C, with the exit code that shells give it."""
    click.echo("error: interrupted", err=True)  # on a new line: click has ended the one with ^C
    _print_document("interrupted", None)
    return 130


def report_bug() -> int:
    click.echo(printable(traceback.format_exc()), nl=False, err=True)
    message = "this is a bug in dflash-trt; please report it with the lines above"
    click.echo(f"\nerror: {message}", err=True)
    _print_document(message, None)
    return 70


def _print_document(error: str, hint: str | None) -> None:
    """Prints the error document with --json, unless a document is out already, as a failed `verify`'s is."""
    options = sys.argv[1:]
    try:
        sys.stdout.flush()
        if "--json" in options[: options.index("--") if "--" in options else None] and not output.has_document:
            output.print_json("error", {"error": printable(error), "hint": hint})
    except OSError:  # full or closed: Python writes what is left in its buffer as it exits, which would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
