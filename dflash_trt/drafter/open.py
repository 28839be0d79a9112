# SPDX-License-Identifier: Apache-2.0
"""Which drafter runs an engine directory: ONNX Runtime where it has the device, else the directory's TensorRT plans."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dflash_trt.drafter.drafter import Drafter
from dflash_trt.engine.manifest import Manifest
from dflash_trt.engine.plan import GRAPHS
from dflash_trt.errors import MissingDependencyError

CUDA_PROVIDER = "CUDAExecutionProvider"


def open_drafter(
    engine: Path,
    manifest: Manifest,
    *,
    num_slots: int = 1,
    device: str = "cpu",
    expose: Sequence[str] = (),
) -> Drafter:
    """The drafter of the directory `engine` with `manifest` on `device`, which is cpu, cuda or cuda:N.

    `expose` names values inside draft.onnx that the drafter can return besides its hidden states; plans have none.
    Raises MissingDependencyError where nothing here runs it on `device`, with what each way lacks, EngineError where
    its plans were built for another machine.
    """
    if device != "cpu" and (lacking := _provider_lacking()):
        if reason := _plans_lacking(manifest, expose):
            raise MissingDependencyError(
                f"{engine}: expected a drafter for {device}, found none: {lacking}; {reason}",
                hint="pip install onnxruntime-gpu in the place of onnxruntime, or on this machine: "
                f"dflash-trt build {engine} --backend tensorrt",
            )
        from dflash_trt.drafter.tensorrt_drafter import TensorRTDrafter

        return TensorRTDrafter(engine, manifest, num_slots=num_slots, device=device)
    from dflash_trt.drafter.onnx_drafter import OnnxDrafter

    return OnnxDrafter(engine, manifest, num_slots=num_slots, device=device, expose=expose)


def _provider_lacking() -> str | None:
    """What keeps ONNX Runtime from CUDA."""
    try:
        import onnxruntime
    except ImportError:
        return "onnxruntime is not installed"
    if CUDA_PROVIDER in (available := onnxruntime.get_available_providers()):
        return None
    return f"onnxruntime {onnxruntime.__version__} has no {CUDA_PROVIDER} but {', '.join(available)}"


def _plans_lacking(manifest: Manifest, expose: Sequence[str]) -> str | None:
    """What keeps the directory's plans from running here, as far as that shows without loading them."""
    if any(graph not in manifest.plans for graph in GRAPHS):
        return "the engine has no TensorRT plans"
    if expose:
        return f"TensorRT plans do not return {expose[0]}"
    from dflash_trt.engine.tensorrt_api import load_tensorrt

    try:
        load_tensorrt()
    except MissingDependencyError as error:
        return f"for its TensorRT plans, {error.message}"
    return None
