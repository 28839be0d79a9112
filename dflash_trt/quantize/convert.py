# SPDX-License-Identifier: Apache-2.0
"""Quantises a draft checkpoint tensor by tensor, in modelopt's layout (`dflash_trt.checkpoint.quantization`)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from dflash_trt._C import NonFiniteError, pack_fp8, pack_nvfp4
from dflash_trt.checkpoint.convert_dialect import WRITTEN, copy_other_files, refuse_own_source
from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, refuse_quantised
from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.mapped import check_finite, map_tensor
from dflash_trt.checkpoint.quantization import BLOCK, FP8, HF_QUANT_CONFIG, Quantization, expected_tensors
from dflash_trt.checkpoint.safetensors_file import BITS_PER_ELEMENT, Tensor
from dflash_trt.checkpoint.safetensors_writer import PRODUCER, PRODUCER_KEY, Layout, SafetensorsWriter, aligned
from dflash_trt.checkpoint.weights import SINGLE
from dflash_trt.errors import CheckpointError
from dflash_trt.files.json_file import write_json
from dflash_trt.files.write import check_replaceable, new_directory
from dflash_trt.quantize.bounds import Ranges, ranges_from_weights
from dflash_trt.quantize.modelopt_config import hf_quant_config, quantization_config
from dflash_trt.quantize.recipe import Recipe
from dflash_trt.quantize.scales import cache_scales, input_scales, weight_scales

DENSE_MODEL_TYPE = "qwen3"


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a checkpoint's tensors."""

    layers: dict[str, int]
    """Linear layers by algorithm."""
    dense_layers: int
    copied_tensors: int
    """Other tensors, byte for byte as they were."""
    source_bytes: int
    """Of all tensors, before."""
    output_bytes: int
    """Of all tensors, after."""


def quantize_checkpoint(
    draft: DraftCheckpoint,
    recipe: Recipe,
    output: Path,
    *,
    ranges: Ranges | None = None,
    force: bool = False,
    threads: int = 0,
) -> Summary:
    """Writes the quantised checkpoint into the new directory `output`.

    `ranges` None takes bounds from the weights; `threads` 0 means all. Raises CheckpointError for a quantised draft,
    NaN or infinity, and layers that do not suit their algorithm or lack a range; RecipeError; BuildError when `output`
    exists and `force` is false, holds the draft, or cannot be written.
    """
    modules = draft.spec.linear_modules()
    algorithms = recipe.algorithms(modules)
    check_quantisable(draft, algorithms)
    refuse_own_source(draft, output)
    check_replaceable(output, WRITTEN, force=force)
    check_finite(draft.weights.values())
    if ranges is None and recipe.needs_ranges(modules):
        ranges = ranges_from_weights(draft)
    scalars = _scalars(draft, recipe, algorithms, ranges)
    scales = weight_scales(draft, algorithms, threads=threads)
    quantization = Quantization(modules=algorithms, fp8_kv_cache=recipe.fp8_kv_cache)

    with new_directory(output, WRITTEN, force=force) as directory:
        layout, note = tensor_layout(draft.spec, draft.weights, quantization), {PRODUCER_KEY: PRODUCER}
        with SafetensorsWriter(directory / SINGLE, layout, metadata=note) as writer:
            for tensor in draft.weights.values():
                module = tensor.name.removesuffix(".weight")
                if module in algorithms and module != tensor.name:
                    pack_tensor(writer, tensor, algorithms[module], scales[module], threads)
                else:
                    writer.copy(tensor)
            for name, value in scalars.items():
                writer.write(name, value)
        _write_config(draft, quantization, directory)
        copy_other_files(draft, directory)
    counts = dict(sorted(Counter(algorithms.values()).items()))
    return Summary(
        layers=counts,
        dense_layers=len(modules) - len(algorithms),
        copied_tensors=len(draft.weights) - len(modules),
        source_bytes=sum(tensor.num_bytes for tensor in draft.weights.values()),
        output_bytes=writer.data_bytes,
    )


def check_quantisable(draft: DraftCheckpoint, algorithms: Mapping[str, str]) -> None:
    """Raises CheckpointError for a draft that is quantised already, or a layer that does not suit its algorithm."""
    refuse_quantised(draft)
    for module, algorithm in algorithms.items():
        tensor = draft.weights[f"{module}.weight"]
        if algorithm != FP8 and tensor.shape[1] % BLOCK:
            raise CheckpointError(
                f"{tensor.file}: tensor {tensor.name!r}: expected columns in multiples of {BLOCK} for"
                f" {algorithm}, found {tensor.shape[1]}",
                hint=f"give {module} the algorithm FP8 or none in a recipe of your own",
            )


def _scalars(
    draft: DraftCheckpoint, recipe: Recipe, algorithms: Mapping[str, str], ranges: Ranges | None
) -> dict[str, np.float32]:
    """The scales of activations and context cache, by tensor name."""
    if ranges is None:
        return {}
    inputs = input_scales(draft.spec, algorithms, ranges.inputs)
    named = {f"{module}.input_scale": scale for module, scale in inputs.items()}
    return named | (cache_scales(draft.spec, ranges) if recipe.fp8_kv_cache else {})


def tensor_layout(spec: DraftSpec, sources: Mapping[str, Tensor], quantization: Quantization) -> Layout:
    """dtype and shape of every tensor that is written; what is not quantised keeps the dtype that `sources` has."""
    expected = expected_tensors(spec.tensor_shapes(), quantization, spec.attention_modules())
    return aligned({n: (d[0] if len(d) == 1 else sources[n].dtype, shape) for n, (d, shape) in expected.items()})


def checkpoint_bytes(draft: DraftCheckpoint, quantization: Quantization) -> int:
    """Of all tensors that `quantize_checkpoint` writes, without writing them."""
    layout = tensor_layout(draft.spec, draft.weights, quantization)
    return sum(math.prod(shape) * BITS_PER_ELEMENT[dtype] // 8 for dtype, shape in layout.values())


def pack_tensor(writer: SafetensorsWriter, tensor: Tensor, algorithm: str, scale: np.float32, threads: int) -> None:
    """Writes a linear layer's codes and scales; the weights stay in the page cache."""
    rows, columns = tensor.shape
    module = tensor.name.removesuffix(".weight")
    try:
        if algorithm == FP8:
            data = np.empty((rows, columns), np.uint8)
            pack_fp8(map_tensor(tensor), float(scale), data, threads=threads)
            writer.write(f"{module}.weight_scale", scale)
        else:
            data = np.empty((rows, columns // 2), np.uint8)
            block_scales = np.empty((rows, columns // BLOCK), np.uint8)
            pack_nvfp4(map_tensor(tensor), float(scale), data, block_scales, threads=threads)
            writer.write(f"{module}.weight_scale", block_scales)
            writer.write(f"{module}.weight_scale_2", scale)
    except NonFiniteError as error:  # the file changed since its ranges were read
        raise CheckpointError(f"{tensor.file}: tensor {tensor.name!r}: {error}") from None
    writer.write(tensor.name, data)


def _write_config(draft: DraftCheckpoint, quantization: Quantization, directory: Path) -> None:
    """config.json with all its keys, in z-lab's layout where the dialect has other names.

    But model_type: TensorRT-LLM builds the layers of the class that it names; a gpt-oss draft has Qwen3's dense ones.
    """
    config = draft.canonical_config()
    config["model_type"] = DENSE_MODEL_TYPE
    write_quantised_config(config, quantization, draft.spec.linear_modules(), directory)


def write_quantised_config(
    config: dict[str, object], quantization: Quantization, modules: list[str], directory: Path
) -> None:
    """Writes config.json and, for a quantised checkpoint, hf_quant_config.json; `modules` are all that may be."""
    if quantization.algorithms():
        config["quantization_config"] = quantization_config(quantization, modules)
        write_json(directory / HF_QUANT_CONFIG, hf_quant_config(quantization, modules))
    write_json(directory / "config.json", config)
