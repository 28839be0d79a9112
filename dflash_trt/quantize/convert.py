# SPDX-License-Identifier: Apache-2.0
"""Quantises a draft tensor by tensor, in the layout and with the configuration of modelopt 0.47.

`dflash-trt quantize` writes the result as a checkpoint, `build` into an engine directory.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np

from dflash_trt.checkpoint.convert_dialect import new_checkpoint
from dflash_trt.checkpoint.decoded_tensor import map_tensor
from dflash_trt.checkpoint.dialects import own
from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.checkpoint.finite import check_finite
from dflash_trt.checkpoint.quantization import Quantization
from dflash_trt.checkpoint.safetensors_file import BITS_PER_ELEMENT
from dflash_trt.checkpoint.safetensors_writer import PRODUCER, PRODUCER_KEY, SafetensorsWriter
from dflash_trt.quantize.bounds import Ranges, ranges_from_weights
from dflash_trt.quantize.packing import check_quantisable, pack
from dflash_trt.quantize.recipe import Recipe
from dflash_trt.quantize.scales import cache_scales, input_scales, weight_scales
from dflash_trt.quantize.unwritten_draft import UnwrittenDraft, tensor_layout, with_claims

DENSE_MODEL_TYPE = "qwen3"


def quantised(
    draft: DraftCheckpoint,
    recipe: Recipe,
    *,
    ranges: Ranges | None = None,
    threads: int = 0,
    like_modelopt: bool = False,
) -> UnwrittenDraft:
    """Packs the layers of `draft` as `recipe` says; scales are computed now, codes when they are written.

    `ranges` None takes bounds from the weights; `threads` 0 means all; `like_modelopt` is as for `pack`. Raises
    CheckpointError for a quantised draft, NaN or infinity, and layers that do not suit their algorithm or lack a range;
    RecipeError.
    """
    modules = draft.spec.linear_modules()
    algorithms = recipe.algorithms(modules)
    quantization = Quantization(modules=algorithms, fp8_kv_cache=recipe.fp8_kv_cache)
    check_quantisable(draft, algorithms)
    check_finite(draft.weights.values())
    if ranges is None and recipe.needs_ranges:
        ranges = ranges_from_weights(draft)
    scalars = {} if ranges is None else _scalars(draft, quantization, ranges)
    scales = weight_scales(draft, algorithms, threads=threads)

    def write(writer: SafetensorsWriter) -> None:
        for tensor in draft.weights.values():
            module = tensor.name.removesuffix(".weight")
            if module in algorithms and module != tensor.name:
                pack(
                    writer, module, tensor, map_tensor(tensor), algorithms[module], scales.get(module), threads,
                    like_modelopt=like_modelopt,
                )  # fmt: skip
            else:
                writer.copy(tensor)
        for name, value in scalars.items():
            writer.write(name, value)

    # TensorRT-LLM builds the layers of the class that model_type names; a gpt-oss draft has Qwen3's dense ones.
    config = draft.canonical_config() | {"model_type": DENSE_MODEL_TYPE}
    is_own = own.SECTION in config  # it names the draft's own type
    dtypes = {name: tensor.dtype for name, tensor in draft.weights.items()}
    return with_claims(
        draft,
        draft.spec if is_own else msgspec.structs.replace(draft.spec, model_type=DENSE_MODEL_TYPE),
        config,
        quantization,
        layout=tensor_layout(draft.spec, dtypes, quantization),
        write_tensors=write,
    )


def quantize_checkpoint(
    draft: DraftCheckpoint,
    recipe: Recipe,
    output: Path,
    *,
    ranges: Ranges | None = None,
    force: bool = False,
    threads: int = 0,
    like_modelopt: bool = False,
) -> Summary:
    """Writes the quantised checkpoint into the new directory `output`.

    Raises as `quantised` does, and BuildError when `output` exists and `force` is false, holds the draft, or cannot be
    written.
    """
    with new_checkpoint(draft, output, force=force) as directory:
        new = quantised(draft, recipe, ranges=ranges, threads=threads, like_modelopt=like_modelopt)
        new.write(directory, metadata={PRODUCER_KEY: PRODUCER})
    return summary(draft, new.quantization)


def _scalars(draft: DraftCheckpoint, quantization: Quantization, ranges: Ranges) -> dict[str, np.float32]:
    """The scales of activations and context cache, by tensor name."""
    inputs = input_scales(draft.spec, quantization.modules, ranges.inputs)
    named = {f"{module}.input_scale": scale for module, scale in inputs.items()}
    return named | (cache_scales(draft.spec, ranges) if quantization.fp8_kv_cache else {})


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Effect of quantising on a checkpoint's tensors."""

    layers: dict[str, int]
    """Linear layers by algorithm."""
    dense_layers: int
    copied_tensors: int
    """Other tensors, byte for byte as they were."""
    source_bytes: int
    """Bytes of all tensors before."""
    output_bytes: int
    """Bytes of all tensors after."""


def summary(draft: DraftCheckpoint, quantization: Quantization) -> Summary:
    """Summary of the quantised tensors of `draft`."""
    modules = draft.spec.linear_modules()
    algorithms = [quantization.modules[module] for module in modules if module in quantization.modules]
    return Summary(
        layers=dict(sorted(Counter(algorithms).items())),
        dense_layers=len(modules) - len(algorithms),
        copied_tensors=len(draft.weights) - len(modules),
        source_bytes=sum(tensor.num_bytes for tensor in draft.weights.values()),
        output_bytes=checkpoint_bytes(draft, quantization),
    )


def checkpoint_bytes(draft: DraftCheckpoint, quantization: Quantization) -> int:
    """Bytes of all tensors of `draft` once quantised."""
    layout = tensor_layout(draft.spec, {name: tensor.dtype for name, tensor in draft.weights.items()}, quantization)
    return sum(math.prod(shape) * BITS_PER_ELEMENT[dtype] // 8 for dtype, shape in layout.values())
