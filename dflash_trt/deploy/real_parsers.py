# SPDX-License-Identifier: Apache-2.0
"""`python -m dflash_trt.deploy.real_parsers RUNTIME COMMAND...`: the runtime's own parser reads a command line.

Exits with 0 where it is taken and with NOT_IMPORTED where the runtime does not import here; otherwise the last line on
stderr says why it is refused. Loads the runtime, starts nothing.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from dflash_trt.deploy.flags import PROGRAMS

NOT_IMPORTED = 3


def main(runtime: str, command: list[str]) -> None:
    """Parses what follows the program's name."""
    words = command[len(PROGRAMS[runtime][0]) :]
    try:
        {"vllm": _vllm, "sglang": _sglang}[runtime](words)
    except (ImportError, OSError) as problem:
        print(f"{type(problem).__name__}: {problem}", file=sys.stderr)
        sys.exit(NOT_IMPORTED)


def _vllm(words: list[str]) -> None:
    """What `vllm serve` does before it starts: its parser, then the engine's arguments."""
    parser = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser(prog="vllm")
    serve = import_module("vllm.entrypoints.cli.serve").ServeSubcommand()
    serve.subparser_init(parser.add_subparsers())
    arguments = parser.parse_args(["serve", *words])
    arguments.model = arguments.model_tag
    import_module("vllm.engine.arg_utils").AsyncEngineArgs.from_cli_args(arguments)


def _sglang(words: list[str]) -> None:
    """Its parser alone: what it checks after that asks for a GPU."""
    parser = argparse.ArgumentParser(prog="sglang serve")
    import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    parser.parse_args(words)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
