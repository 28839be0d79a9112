# SPDX-License-Identifier: Apache-2.0
"""Starts a console command, TensorRT-LLM's or ours, inside a process whose main module registers the drafter."""

from __future__ import annotations

import runpy
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

from dflash_trt.deploy.trtllm_arguments import ENGINE_MODE
from dflash_trt.errors import EngineError

MODULE = ENGINE_MODE[-1]
DYNAMO = "dynamo.trtllm"
"""NVIDIA Dynamo's worker around TensorRT-LLM, which has no console script."""


def run_command(command: Sequence[str]) -> None:
    """Runs the console script `command[0]`, or dynamo.trtllm, with the rest as arguments; exits with its status."""
    if command and command[0] == DYNAMO:
        sys.argv[:] = list(command)
        runpy.run_module(DYNAMO, run_name="__main__")  # in place: sys.modules keeps the main module that registers
        sys.exit()
    scripts = {script.name: script for script in entry_points(group="console_scripts")}
    if not command or command[0] not in scripts:
        sys.exit(f"usage: {' '.join(ENGINE_MODE)} trtllm-serve|trtllm-bench|dflash-trt ARGUMENTS...")
    sys.argv[:] = list(command)
    sys.exit(scripts[command[0]].load()())


def check_start() -> None:
    """Raises EngineError where ranks would not import the registration, and so not use our drafter."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None or spec.name != f"{MODULE}.__main__":
        raise EngineError(
            "engine mode: expected a start that registers the drafter in every rank, found another main module",
            hint=f"{' '.join(ENGINE_MODE)} dflash-trt {shlex.join(sys.argv[1:])}",
        )
