# SPDX-License-Identifier: Apache-2.0
"""The command line: stdout is data, stderr is talk.

Exit codes: 0 done, 1 the user can fix it, 2 usage, 70 our bug, 129 SIGHUP, 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from functools import partial
from types import FrameType
from typing import NoReturn

import click

from dflash_trt.cli.bench import bench
from dflash_trt.cli.build import build
from dflash_trt.cli.capture import capture
from dflash_trt.cli.chat import chat
from dflash_trt.cli.convert import convert
from dflash_trt.cli.doctor import doctor
from dflash_trt.cli.drafts import drafts
from dflash_trt.cli.dynamo import dynamo
from dflash_trt.cli.estimate import estimate
from dflash_trt.cli.failure import (
    broken_package,
    fail,
    fail_broken,
    fail_import,
    fail_interrupted,
    fail_usage,
    report_bug,
)
from dflash_trt.cli.generate import generate
from dflash_trt.cli.help_sections import SectionedGroup, format_options
from dflash_trt.cli.inspect import inspect
from dflash_trt.cli.log_options import add_log_options, restored_streams
from dflash_trt.cli.quantize import quantize
from dflash_trt.cli.recover import recover
from dflash_trt.cli.search import search
from dflash_trt.cli.serve import serve
from dflash_trt.cli.serve_config import serve_config
from dflash_trt.cli.triton_repo import triton_repo
from dflash_trt.cli.try_ import try_
from dflash_trt.cli.tune import tune
from dflash_trt.cli.verify import verify
from dflash_trt.cli.version import print_version
from dflash_trt.errors import DFlashError

COMPLETION = """\b
Completion in bash (zsh_source, fish_source for other shells):
  eval "$(_DFLASH_TRT_COMPLETE=bash_source dflash-trt)"
"""


def leaves(command: click.Command) -> Iterator[click.Command]:
    """The commands below a group, without groups."""
    if isinstance(command, click.Group):
        for each in command.commands.values():
            yield from leaves(each)
    else:
        yield command


@click.group(cls=SectionedGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog=COMPLETION)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=print_version,
              help="Show the version, its commit and what its kernels are compiled for, and exit.")  # fmt: skip
def cli() -> None:
    """DFlash speculative decoding: from a draft checkpoint to engines, configurations and servers."""


for command in (
    drafts, inspect, capture, quantize, search, recover, convert, build, generate, verify, chat, serve, dynamo,
    serve_config, estimate, tune, bench, triton_repo, doctor, try_,
):  # fmt: skip
    cli.add_command(command)
for leaf in leaves(cli):
    add_log_options(leaf)
    leaf.format_options = partial(format_options, leaf)  # type: ignore[method-assign]


def main() -> NoReturn:
    """Runs the command line and exits, in its own words whatever happens."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _terminate)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # `dflash_trt.__main__` sets it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(_run())


def _run() -> int:
    with restored_streams():
        return _exit_code()


def _exit_code() -> int:
    try:
        code = cli.main(prog_name="dflash-trt", standalone_mode=False)
    except click.ClickException as error:
        return fail_usage(error)
    except (KeyboardInterrupt, click.Abort):
        return fail_interrupted()
    except DFlashError as error:
        return fail(error)
    except Exception as error:
        return _fail_unexpectedly(error)
    return code if isinstance(code, int) else 0


def _fail_unexpectedly(error: Exception) -> int:
    """Reports an error that is not described yet: of a package, of the file system, or our bug."""
    if (module := broken_package(error)) is not None:
        return fail_broken(module, error)
    if isinstance(error, ModuleNotFoundError):
        return fail_import(error)
    if isinstance(error, OSError):  # not yet described by a reader or writer
        where = f"{error.filename}: " if error.filename else ""
        return fail(DFlashError(f"{where}expected to read or write, found: {error.strerror or error}"))
    return report_bug()


def _terminate(signal_number: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM, and a terminal that closes, unwind the stack, so that half-written directories are removed."""
    sys.exit(128 + signal_number)
