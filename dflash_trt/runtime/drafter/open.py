# SPDX-License-Identifier: Apache-2.0
"""The drafter of an engine directory: on ONNX Runtime where it has the device, else on TensorRT plans."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dflash_trt.engine.executor import Executor
from dflash_trt.engine.manifest import Manifest
from dflash_trt.engine.plans.plan import GRAPHS
from dflash_trt.errors import EngineError, MissingDependencyError
from dflash_trt.files.command import quoted
from dflash_trt.runtime.drafter.drafter import Drafter

CUDA_PROVIDER = "CUDAExecutionProvider"


def open_drafter(
    engine: Path, manifest: Manifest, *, num_slots: int = 1, device: str = "cpu", expose: Sequence[str] = ()
) -> Drafter:
    """The drafter of the directory `engine` with `manifest`, loaded, with a context for each of `num_slots`.

    Raises MissingDependencyError and EngineError as `choose_executor` does and its choice when it is loaded.
    """
    executor = choose_executor(engine, manifest, device=device, expose=expose)
    from dflash_trt.runtime.drafter.embedding import DraftEmbedding
    from dflash_trt.runtime.drafter.markov_head import read_scorer

    embedding = DraftEmbedding.read(engine, manifest.draft, executor.device)
    scorer = read_scorer(engine, manifest.draft, executor.device)
    return Drafter.open(executor, manifest.draft, num_slots=num_slots, embedding=embedding, scorer=scorer)


def choose_executor(engine: Path, manifest: Manifest, *, device: str = "cpu", expose: Sequence[str] = ()) -> Executor:
    """The executor of the directory `engine` on `device`, which is cpu, cuda or cuda:N; not yet loaded.

    `expose` names values inside draft.onnx that it can return besides the hidden states; plans have none.
    Raises MissingDependencyError where nothing here runs them on `device`, with the reasons, EngineError for a
    shard.
    """
    if manifest.shard is not None:
        raise EngineError(
            f"{engine}: expected a whole drafter, found {manifest.shard}, which computes with the others only",
            hint=f"give the engine directory above it: {quoted(engine.absolute().parent)}",
        )
    if device != "cpu" and (lacking := _provider_lacking()):
        if reason := _plans_lacking(manifest, expose):
            raise MissingDependencyError(
                f"{engine}: expected a drafter for {device}, found none: {lacking}; {reason}",
                hint="pip install onnxruntime-gpu instead of onnxruntime, or on this machine: "
                f"dflash-trt build --plans-for {quoted(engine)}",
            )
        import torch

        from dflash_trt.engine.plans.launcher import CudaLauncher
        from dflash_trt.engine.plans.tensorrt_executor import TensorRTExecutor

        return TensorRTExecutor(engine, manifest, CudaLauncher(torch.device(device)))
    from dflash_trt.runtime.drafter.onnx_executor import OnnxExecutor

    return OnnxExecutor(engine, manifest, device=device, expose=expose)


def _provider_lacking() -> str | None:
    """Why ONNX Runtime cannot use CUDA; None if it can."""
    try:
        import onnxruntime
    except ImportError:
        return "onnxruntime is not installed"
    if CUDA_PROVIDER in (available := onnxruntime.get_available_providers()):
        return None
    return f"onnxruntime {onnxruntime.__version__} has no {CUDA_PROVIDER} but {', '.join(available)}"


def _plans_lacking(manifest: Manifest, expose: Sequence[str]) -> str | None:
    """Why the directory's plans cannot run here, as far as shown without loading them; None if nothing does."""
    if any(graph not in manifest.plans for graph in GRAPHS):
        return "the engine has no TensorRT plans"
    if expose:
        return f"TensorRT plans do not return {expose[0]}"
    from dflash_trt.engine.plans.tensorrt_api import load_tensorrt

    try:
        load_tensorrt(manifest.plans["draft"].runtime)
    except MissingDependencyError as error:
        return f"for its TensorRT plans, {error.message}"
    return None
