# SPDX-License-Identifier: Apache-2.0
"""dflash-trt: TensorRT engines and a runtime for DFlash speculative decoding."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_trt.api.backend import Chunk as Chunk
    from dflash_trt.api.completion import Completion as Completion
    from dflash_trt.api.sampling_params import Grammar as Grammar
    from dflash_trt.api.sampling_params import SamplingParams as SamplingParams
    from dflash_trt.errors import DFlashError as DFlashError
    from dflash_trt.errors import RequestError as RequestError
    from dflash_trt.llm import LLM as LLM
    from dflash_trt.runtime.spec_generate import spec_generate as spec_generate

__version__ = "0.1.0"
__all__ = [
    "LLM", "Chunk", "Completion", "DFlashError", "Grammar", "RequestError", "SamplingParams", "__version__",
    "spec_generate",
]  # fmt: skip

# Before onnxruntime is imported: findings/onnxruntime_import_writes_a_device_id.sh
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

_HOMES = {
    "LLM": "llm",
    "Chunk": "api.backend",
    "Completion": "api.completion",
    "DFlashError": "errors",
    "Grammar": "api.sampling_params",
    "RequestError": "errors",
    "SamplingParams": "api.sampling_params",
    "spec_generate": "runtime.spec_generate",
}


def __getattr__(name: str) -> object:
    """The Python API, loaded with torch and ONNX Runtime when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'dflash_trt' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"dflash_trt.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """The Python API."""
    return sorted(__all__)
