# SPDX-License-Identifier: Apache-2.0
"""`python -m dflash_trt.deploy.real_parsers RUNTIME COMMAND...`: the runtime's own parser reads a command line.

Exits with 0 where it is taken; otherwise the last line on stderr says why. Loads the runtime, starts nothing.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import Any

from dflash_trt.deploy.flags import PROGRAMS


def main(runtime: str, command: list[str]) -> None:
    """Parses what follows the program's name."""
    words = command[len(PROGRAMS[runtime][0]) :]
    {"vllm": _vllm, "sglang": _sglang}[runtime](words)


def _vllm(words: list[str]) -> None:
    """As `vllm serve` does before it starts: its parser, then the engine's arguments."""
    parser = _vllm_parser_class()(prog="vllm serve")
    parser = import_module("vllm.entrypoints.openai.cli_args").make_arg_parser(parser)
    arguments = parser.parse_args(words)
    import_module("vllm.engine.arg_utils").AsyncEngineArgs.from_cli_args(arguments)


def _vllm_parser_class() -> Any:
    """FlexibleArgumentParser; vllm.utils became a package."""
    try:
        return import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    except ImportError:
        return import_module("vllm.utils").FlexibleArgumentParser


def _sglang(words: list[str]) -> None:
    """Its parser alone: what it checks after that asks for a GPU."""
    parser = argparse.ArgumentParser(prog="sglang serve")
    import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    parser.parse_args(words)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
