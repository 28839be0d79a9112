# SPDX-License-Identifier: Apache-2.0
"""The drafter of an engine directory: on TensorRT plans or torch on a GPU, on ONNX Runtime or torch on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from dflash_trt.engine.candidate_scorer import read_scorer
from dflash_trt.engine.executor import Executor
from dflash_trt.engine.manifest import Manifest
from dflash_trt.errors import EngineError
from dflash_trt.files.command import quoted
from dflash_trt.runtime.drafter.drafter import DraftEmbedding, Drafter


def open_drafter(
    engine: Path, manifest: Manifest, *, num_slots: int = 1, device: str = "cpu", executor: str = "auto",
    expose: Sequence[str] = (),
) -> Drafter:  # fmt: skip
    """The drafter of the directory `engine` with `manifest`, loaded, with a context for each of `num_slots`.

    Raises MissingDependencyError and EngineError as `choose_executor` does and its choice when it is loaded.
    """
    chosen = choose_executor(engine, manifest, device=device, executor=executor, expose=expose)
    embedding = DraftEmbedding.read(engine, manifest.draft, chosen.device)
    scorer = read_scorer(engine, manifest.draft, chosen)
    return Drafter.open(chosen, manifest.draft, num_slots=num_slots, embedding=embedding, scorer=scorer)


def choose_executor(
    engine: Path, manifest: Manifest, *, device: str = "cpu", executor: str = "auto", expose: Sequence[str] = ()
) -> Executor:
    """The executor of the directory `engine` on `device`, which is cpu, cuda or cuda:N; not yet loaded.

    `executor` is one of EXECUTORS; auto takes the plans on a GPU, or torch where the directory has none, and ONNX
    Runtime on a CPU. `expose` names values inside draft.onnx that its `draft` returns, too; plans have
    none. Raises EngineError for an executor that has no `device`, and for a shard.
    """
    if manifest.shard is not None:
        raise EngineError(
            f"{engine} is only {manifest.shard} of a drafter",
            hint=f"give the engine directory above it: {quoted(engine.absolute().parent)}",
        )
    is_cpu = device == "cpu"
    if executor == "auto":
        has_plans = all(graph in manifest.plans for graph in manifest.graphs)
        executor = "onnxruntime" if is_cpu else "tensorrt" if has_plans and not expose else "torch"
    if executor == "onnxruntime":
        if not is_cpu:
            raise _another_device("onnxruntime", "cpu", device)
        from dflash_trt.runtime.drafter.onnx_executor import OnnxExecutor

        return OnnxExecutor(engine, manifest, expose=expose)
    from dflash_trt.device.launcher import CudaLauncher, EagerLauncher
    from dflash_trt.engine.plans.tensorrt_executor import TensorRTExecutor
    from dflash_trt.runtime.drafter.torch_executor import TorchExecutor

    if executor == "torch":
        launcher = EagerLauncher() if is_cpu else CudaLauncher(torch.device(device))
        return TorchExecutor(engine, manifest, launcher, expose=expose)
    if is_cpu:
        raise _another_device("tensorrt", "cuda", device)
    if expose:
        raise EngineError(f"TensorRT plans do not return {expose[0]}")
    return TensorRTExecutor(engine, manifest, CudaLauncher(torch.device(device)))


def _another_device(executor: str, expected: str, found: str) -> EngineError:
    return EngineError(
        f"executor {executor}: expected device {expected}, found {found}",
        hint=f"give --device {expected}, or --executor torch, which has both",
    )
