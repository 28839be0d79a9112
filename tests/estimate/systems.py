# SPDX-License-Identifier: Apache-2.0
"""Systems that the tests of the cost model price."""

from __future__ import annotations

import msgspec

from dflash_trt.estimate.constants import rates
from dflash_trt.estimate.inputs import system
from dflash_trt.estimate.shapes import System
from dflash_trt.estimate.step import StepModel
from tests.deploy.deployments import resolved

MOE, DENSE, ENGINE = "gpt-oss-120b.b300x8.latency", "qwen3-8b.h200x1.latency", "gpt-oss-120b.b300x8.nvfp4"
NAMES = (MOE, DENSE, ENGINE)


def system_of(name: str, **changes: object) -> System:
    """The system of build_configs/NAME.yaml under TensorRT-LLM."""
    return msgspec.structs.replace(system(resolved(name), "trtllm"), **changes)


def model_of(name: str, **changed_rates: float) -> StepModel:
    """Its cost model, with some rates changed."""
    machine = system_of(name)
    return StepModel(machine, msgspec.structs.replace(rates(machine.gpu, machine.runtime), **changed_rates))
