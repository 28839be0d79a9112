# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt build --plans-for`, and --backend of a new engine."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.cli.build_request import BuildRequest
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.engine.plans.plan import PlanOptions
from dflash_trt.errors import DFlashError
from dflash_trt.files.command import quoted


def add_plans_to(engine: Path, request: BuildRequest) -> None:
    """Adds plans; an error also says that the engine is complete without them."""
    from dflash_trt.engine.plans.add_plans import add_plans

    plan_options = (read_manifest(engine).plan_options or PlanOptions()).changed(**request.plan_changes)
    try:
        add_plans(engine, plan_options, request.cache)
    except DFlashError as error:
        next_command = f"dflash-trt build --plans-for {quoted(engine)}"
        hint = f"{error.hint}; then: {next_command}" if error.hint else next_command
        raise type(error)(
            f"{error.message}\n{engine} is complete for ONNX Runtime, without new plans", hint=hint
        ) from None
