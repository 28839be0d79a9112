# SPDX-License-Identifier: Apache-2.0
"""Puts our drafter in the place of TensorRT-LLM's own, in the process that imports it."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from dflash_trt.engine.manifest import read_manifest
from dflash_trt.errors import EngineError
from dflash_trt.trtllm.contract import INTERFACE, REGISTRY, WorkerVersion, check_contract


def register() -> WorkerVersion:
    """The generation of worker that was found.

    Raises EngineError with every difference where this TensorRT-LLM is not one that this was written for.
    """
    generation = check_contract()
    mode = import_module(INTERFACE).SpeculativeDecodingMode.DFLASH
    import_module(REGISTRY).register_draft_model(mode)(build_draft_model)
    return generation


def build_draft_model(model_config: Any, draft_config: Any, lm_head: Any, model: Any) -> Any:
    """The drafter of the engine directory that `speculative_model` names; its plans are loaded with the weights.

    Of an engine that ranks share, it is this rank's part. Raises EngineError when that is no engine directory, is
    shared by other ranks than there are, or has no plans, when these were built for another GPU or TensorRT than are
    here, for an attention backend whose cache our plans do not read, and for plans whose cache has a
    dtype of its own: the worker casts taps to the cache's.
    """
    from dflash_trt.engine.plans.launcher import CurrentStreamLauncher
    from dflash_trt.engine.plans.tensorrt_executor import TensorRTExecutor
    from dflash_trt.trtllm.context_pool import BACKENDS, declare_pool
    from dflash_trt.trtllm.dflash2_drafter import DFlash2EngineDrafter
    from dflash_trt.trtllm.drafter_module import EngineDrafter
    from dflash_trt.trtllm.rank_engine import all_reduce, rank_engine

    spec_config = model_config.spec_config
    if spec_config.attention_backend not in BACKENDS:
        raise EngineError(
            f"speculative_config.attention_backend: expected {' or '.join(BACKENDS)} for engine mode,"
            f" found {spec_config.attention_backend}"
        )
    directory = Path(spec_config.speculative_model).absolute()
    manifest = read_manifest(directory)
    if manifest.quantization.fp8_kv_cache:
        raise EngineError(
            f"{directory}: expected plans with a BF16 context cache for engine mode, found FP8",
            hint="build with the recipe without +fp8-kv",
        )
    draft = manifest.draft
    if draft.is_dspark:
        raise EngineError(
            f"{directory}: expected a DFlash or DFlash2 draft for engine mode, found a DSpark draft, whose block and"
            " Markov head that worker does not know",
            hint="decode with the engine here: dflash-trt generate",
        )
    if found := draft.own_vocabulary:
        raise EngineError(
            f"{directory}: expected a draft without embedding and lm_head of its own for engine mode, whose worker"
            f" computes with the target's, found {' and '.join(found)}",
            hint="decode with the engine here (dflash-trt generate), or let TensorRT-LLM load the checkpoint itself",
        )
    if (stages := model_config.mapping.pp_size) > 1:
        raise EngineError(
            f"engine mode: expected pipeline_parallel_size 1, found {stages}: its drafter is on every"
            " rank, and taps come from all layers",
            hint="set tensor_parallel_size to the number of GPUs, or serve the target without a drafter",
        )
    in_pool, mapping = BACKENDS[spec_config.attention_backend], model_config.mapping
    place, manifest = rank_engine(directory, manifest, mapping)
    draft = manifest.draft
    if in_pool:
        declare_pool(draft_config, draft)
    shared = None if manifest.shard is None else all_reduce(mapping)
    executor = TensorRTExecutor(place, manifest, CurrentStreamLauncher(), shared)
    executor.check()  # now, and not when the target's weights have been read
    if draft.candidate_selector is not None:
        return DFlash2EngineDrafter(draft_config, draft, executor, directory, in_pool=in_pool)
    return EngineDrafter(draft_config, draft, executor, in_pool=in_pool)
