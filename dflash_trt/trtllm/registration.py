# SPDX-License-Identifier: Apache-2.0
"""Put our drafter in the place of TensorRT-LLM's own, in this process."""

from __future__ import annotations

import inspect
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

from dflash_trt.engine.manifest import read_manifest
from dflash_trt.errors import EngineError
from dflash_trt.trtllm.contract import INTERFACE, REGISTRY, WORKER, check_contract


def register() -> str:
    """Register our drafter, and make the worker prove that it is called; return the release of TensorRT-LLM.

    Raises EngineError with every difference where this TensorRT-LLM is not one that engine mode was written for.
    """
    release = check_contract()
    mode, registry = import_module(INTERFACE).SpeculativeDecodingMode.DFLASH, import_module(REGISTRY)
    if registry.get_registered_draft_model_builder(mode) is not build_draft_model:
        registry.register_draft_model(mode)(build_draft_model)
        _require_our_drafter(import_module(WORKER).DFlashWorker)
    return release


def _require_our_drafter(worker: Any) -> None:
    """Fail the first drafted step of `worker` that did not call our drafter.

    A target may build a drafter of its own past the registry. Every step with generating requests passes through this
    method in each rank; a CUDA graph is captured through it.
    """
    step = worker._forward_impl
    signature = inspect.signature(step)

    @wraps(step)
    def checked_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments
        drafter, attention = given["draft_model"], given["attn_metadata"]
        has_drafts = attention.num_seqs > attention.num_contexts and given["spec_metadata"].runtime_draft_len > 0
        if has_drafts and not getattr(drafter, "has_drafted", False):
            found = f"{type(drafter).__module__}.{type(drafter).__qualname__}"
            raise EngineError(
                "engine mode: expected the first drafted step to call the registered drafter, found that TensorRT-LLM"
                f" drafts with {found}: this target family builds its own",
                hint="serve in native mode: mode: native in the deployment file",
            )
        return result

    worker._forward_impl = checked_step


def build_draft_model(model_config: Any, draft_config: Any, lm_head: Any, model: Any) -> Any:
    """Build the drafter, or this rank's share, of the engine that `speculative_model` names; plans load with weights.

    Raises EngineError where that is no engine directory, is shared by another number of ranks, or has no plans; for
    plans of another GPU or TensorRT; for an attention backend whose cache our plans do not read; and for an FP8
    context cache, because the worker casts taps to the cache's dtype.
    """
    from dflash_trt.engine.plans.launcher import CurrentStreamLauncher
    from dflash_trt.engine.plans.tensorrt_executor import TensorRTExecutor
    from dflash_trt.trtllm.context_pool import BACKENDS, declare_pool
    from dflash_trt.trtllm.drafter_module import DFlash2EngineDrafter, EngineDrafter
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
            f"{directory}: expected a DFlash or DFlash2 draft for engine mode, found {draft.kind}, whose"
            " block, or Markov head, that worker does not know",
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
    executor.check()  # before the target's weights are read
    if draft.candidate_selector is not None:
        return DFlash2EngineDrafter(draft_config, draft, executor, directory, in_pool=in_pool)
    return EngineDrafter(draft_config, draft, executor, in_pool=in_pool)
