# SPDX-License-Identifier: Apache-2.0
"""Quantises a draft tensor by tensor, in the layout and with the configuration of modelopt 0.47.

`dflash-trt quantize` writes the result as a checkpoint, `build` into an engine directory.
"""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dflash_trt import __version__
from dflash_trt._C import pack_fp8, pack_int4, pack_nvfp4
from dflash_trt.checkpoint.convert_dialect import new_checkpoint
from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, read_spec, refuse_quantised
from dflash_trt.checkpoint.draft_spec import HEAD, DraftSpec
from dflash_trt.checkpoint.draft_tensors import tensor_shapes
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.finite import check_finite
from dflash_trt.checkpoint.mapped import map_tensor
from dflash_trt.checkpoint.quantization import (
    BLOCK,
    BLOCKS,
    FP8,
    HF_QUANT_CONFIG,
    INT4,
    INT4_BLOCK,
    MIXED,
    NVFP4,
    Quantization,
    expected_tensors,
)
from dflash_trt.checkpoint.safetensors_file import BITS_PER_ELEMENT, StoredTensor
from dflash_trt.checkpoint.safetensors_writer import PRODUCER, PRODUCER_KEY, Layout, SafetensorsWriter, aligned
from dflash_trt.checkpoint.weights import SINGLE
from dflash_trt.errors import CheckpointError
from dflash_trt.files.json_file import write_json
from dflash_trt.quantize.bounds import Ranges, ranges_from_weights
from dflash_trt.quantize.recipe import Recipe
from dflash_trt.quantize.scales import cache_scales, input_scales, naming, weight_scales

Json = dict[str, object]
# Readers demand this name: vLLM (weight_utils.py get_quant_config) and TensorRT-LLM (auto_deploy) refuse others.
MODELOPT = {"name": "modelopt", "version": "0.47.0", "layout_written_by": f"dflash-trt {__version__}"}
FLOAT8: Json = {"dynamic": False, "num_bits": 8, "type": "float"}
FLOAT4: Json = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK}
DENSE_MODEL_TYPE = "qwen3"


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a checkpoint's tensors."""

    layers: dict[str, int]
    """Linear layers by algorithm."""
    dense_layers: int
    copied_tensors: int
    """Other tensors, byte for byte as they were."""
    source_bytes: int
    """Bytes of all tensors before."""
    output_bytes: int
    """Bytes of all tensors after."""


class UnwrittenDraft(msgspec.Struct, frozen=True, kw_only=True):
    """A draft checkpoint that is not written yet: its facts, its layout, and what packs and writes its tensors."""

    origin: DraftCheckpoint
    """Checkpoint that it is made from."""
    spec: DraftSpec
    quantization: Quantization
    config: dict[str, object]
    """config.json, in z-lab's layout or our own."""
    hf_quant_config: Path | dict[str, object] | None
    """hf_quant_config.json, or the file to copy it from; None for a draft without one."""
    layout: Layout
    """dtype and shape by name, in file order."""
    write_tensors: Callable[[SafetensorsWriter], None]

    def write(self, directory: Path, *, metadata: Mapping[str, str] = MappingProxyType({})) -> None:
        """Writes model.safetensors, with `metadata` in its header, and the configuration into `directory`."""
        with SafetensorsWriter(directory / SINGLE, self.layout, metadata=metadata) as writer:
            self.write_tensors(writer)
        if isinstance(self.hf_quant_config, Path):
            shutil.copyfile(self.hf_quant_config, directory / HF_QUANT_CONFIG)
        elif self.hf_quant_config is not None:
            write_json(directory / HF_QUANT_CONFIG, self.hf_quant_config)
        write_json(directory / "config.json", self.config)


def unchanged(draft: DraftCheckpoint) -> UnwrittenDraft:
    """Copies every tensor of `draft` byte for byte; raises CheckpointError for NaN and infinity."""
    check_finite(draft.weights.values())

    def write(writer: SafetensorsWriter) -> None:
        for tensor in draft.weights.values():
            writer.copy(tensor)

    file = draft.directory / HF_QUANT_CONFIG
    return UnwrittenDraft(
        origin=draft,
        spec=draft.spec,
        quantization=draft.quantization,
        config=draft.canonical_config(),
        hf_quant_config=file if file.is_file() else None,
        layout={name: (tensor.dtype, tensor.shape) for name, tensor in draft.weights.items()},
        write_tensors=write,
    )


def quantised(
    draft: DraftCheckpoint, recipe: Recipe, *, ranges: Ranges | None = None, threads: int = 0
) -> UnwrittenDraft:
    """Packs the layers of `draft` as `recipe` says; scales are computed now, codes when they are written.

    `ranges` None takes bounds from the weights; `threads` 0 means all. Raises CheckpointError for a quantised draft,
    NaN or infinity, and layers that do not suit their algorithm or lack a range; RecipeError.
    """
    modules = draft.spec.linear_modules()
    algorithms = recipe.algorithms(modules)
    check_quantisable(draft, algorithms)
    check_finite(draft.weights.values())
    if ranges is None and recipe.needs_ranges(modules):
        ranges = ranges_from_weights(draft)
    scalars = _scalars(draft, recipe, algorithms, ranges)
    scales = weight_scales(draft, algorithms, threads=threads)

    def write(writer: SafetensorsWriter) -> None:
        for tensor in draft.weights.values():
            module = tensor.name.removesuffix(".weight")
            if module in algorithms and module != tensor.name:
                pack(writer, module, tensor, map_tensor(tensor), algorithms[module], scales.get(module), threads)
            else:
                writer.copy(tensor)
        for name, value in scalars.items():
            writer.write(name, value)

    # TensorRT-LLM builds the layers of the class that model_type names; a gpt-oss draft has Qwen3's dense ones.
    config = draft.canonical_config() | {"model_type": DENSE_MODEL_TYPE}
    quantization = Quantization(modules=algorithms, fp8_kv_cache=recipe.fp8_kv_cache)
    dtypes = {name: tensor.dtype for name, tensor in draft.weights.items()}
    return with_claims(draft, config, quantization, modules, tensor_layout(draft.spec, dtypes, quantization), write)


def with_claims(
    origin: DraftCheckpoint, config: dict[str, object], quantization: Quantization, modules: list[str], layout: Layout,
    write: Callable[[SafetensorsWriter], None],
) -> UnwrittenDraft:  # fmt: skip
    """A draft whose configuration claims `quantization`; `modules` are all layers that may be quantised."""
    claims = hf_quant_config(quantization, modules) if quantization.algorithms() else None
    if claims is not None:
        config = config | {"quantization_config": quantization_config(quantization, modules)}
    return UnwrittenDraft(
        origin=origin,
        spec=read_spec(Facts(config, origin.config.file), origin.weights),
        quantization=quantization,
        config=config,
        hf_quant_config=claims,
        layout=layout,
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
) -> Summary:
    """Writes the quantised checkpoint into the new directory `output`.

    Raises as `quantised` does, and BuildError when `output` exists and `force` is false, holds the draft, or cannot be
    written.
    """
    with new_checkpoint(draft, output, force=force) as directory:
        quantised(draft, recipe, ranges=ranges, threads=threads).write(directory, metadata={PRODUCER_KEY: PRODUCER})
    return summary(draft, recipe)


def summary(draft: DraftCheckpoint, recipe: Recipe) -> Summary:
    """What `recipe` makes of the tensors of `draft`."""
    modules = draft.spec.linear_modules()
    algorithms = recipe.algorithms(modules)
    return Summary(
        layers=dict(sorted(Counter(algorithms.values()).items())),
        dense_layers=len(modules) - len(algorithms),
        copied_tensors=len(draft.weights) - len(modules),
        source_bytes=sum(tensor.num_bytes for tensor in draft.weights.values()),
        output_bytes=checkpoint_bytes(draft, Quantization(modules=algorithms, fp8_kv_cache=recipe.fp8_kv_cache)),
    )


def check_quantisable(draft: DraftCheckpoint, algorithms: Mapping[str, str]) -> None:
    """Raises CheckpointError for a draft that is quantised already, or a layer that does not suit its algorithm."""
    refuse_quantised(draft)
    for module, algorithm in algorithms.items():
        tensor = draft.weights[f"{module}.weight"]
        rows, columns = tensor.shape
        if columns % (block := BLOCKS.get(algorithm, 1)):
            found = f"columns in multiples of {block} for {algorithm}, found {columns}"
        elif algorithm == INT4 and rows % 2:
            found = f"an even number of rows for {algorithm}, found {rows}"
        else:
            continue
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name!r}: expected {found}",
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


def tensor_layout(spec: DraftSpec, dtypes: Mapping[str, str], quantization: Quantization) -> Layout:
    """dtype and shape of every tensor that is written; a dense one keeps its dtype of `dtypes`."""
    expected = expected_tensors(tensor_shapes(spec), quantization, spec.attention_modules())
    return aligned({n: (d[0] if len(d) == 1 else dtypes[n], shape) for n, (d, shape) in expected.items()})


def checkpoint_bytes(draft: DraftCheckpoint, quantization: Quantization) -> int:
    """Bytes of all tensors of `draft` once quantised."""
    layout = tensor_layout(draft.spec, {name: tensor.dtype for name, tensor in draft.weights.items()}, quantization)
    return sum(math.prod(shape) * BITS_PER_ELEMENT[dtype] // 8 for dtype, shape in layout.values())


def pack(
    writer: SafetensorsWriter, module: str, tensor: StoredTensor, weights: NDArray[Any], algorithm: str,
    scale: np.float32 | None, threads: int,
) -> None:  # fmt: skip
    """Writes the codes and scales of `module`, whose `weights` are those of `tensor`, or some of its rows.

    `scale` is None for an algorithm that has none of the whole tensor.
    """
    rows, columns = weights.shape
    shape = {FP8: (rows, columns), INT4: (rows // 2, columns)}.get(algorithm, (rows, columns // 2))
    data = np.empty(shape, np.uint8)
    with naming(tensor):  # the file may have changed since its ranges were read
        if scale is None:
            int4_scales = np.empty((rows, columns // INT4_BLOCK), np.float32)
            pack_int4(weights, data, int4_scales, threads=threads)
            writer.write(f"{module}.weight_scale", int4_scales)
        elif algorithm == FP8:
            pack_fp8(weights, float(scale), data, threads=threads)
            writer.write(f"{module}.weight_scale", scale)
        else:
            block_scales = np.empty((rows, columns // BLOCK), np.uint8)
            pack_nvfp4(weights, float(scale), data, block_scales, threads=threads)
            writer.write(f"{module}.weight_scale", block_scales)
            writer.write(f"{module}.weight_scale_2", scale)
    writer.write(f"{module}.weight", data)


def hf_quant_config(quantization: Quantization, modules: list[str]) -> Json:
    """hf_quant_config.json, where `modules` are all linear layers."""
    algorithms = quantization.modules
    details: Json = {"quant_algo": None, "kv_cache_quant_algo": FP8 if quantization.fp8_kv_cache else None}
    used = set(algorithms.values())
    if len(used) == 1:
        details |= _layer(used.pop())
        details["exclude_modules"] = _exclude_modules([m for m in {*modules, HEAD} if m not in algorithms])
    else:
        details["quant_algo"] = MIXED if used else None
        details["quantized_layers"] = {m: _layer(algorithms[m]) for m in modules if m in algorithms}
    return {"producer": MODELOPT, "quantization": details}


def quantization_config(quantization: Quantization, modules: list[str]) -> Json:
    """config.json's quantization_config, as modelopt's convert_hf_config.py spells it."""
    algorithms, config = quantization.modules, Json()
    details = hf_quant_config(quantization, modules)["quantization"]
    assert isinstance(details, dict)
    used = list(dict.fromkeys(algorithms.values()))
    if used == [INT4]:
        pass  # modelopt 0.47 writes no group for it, unless it stands beside another algorithm
    elif len(used) == 1:
        config["config_groups"] = {"group_0": {**_group(used[0]), "targets": ["Linear"]}}
    elif used:
        targets = [sorted(m for m in algorithms if algorithms[m] == a) for a in used]
        groups = zip(used, targets, strict=True)
        config["config_groups"] = {f"group_{i}": {**_group(a), "targets": t} for i, (a, t) in enumerate(groups)}
        config["quantized_layers"] = details["quantized_layers"]
    config["ignore"] = details.get("exclude_modules", [])
    if used:
        config["quant_algo"] = details["quant_algo"]
    if quantization.fp8_kv_cache:
        config["kv_cache_scheme"] = FLOAT8
    return config | {"producer": MODELOPT, "quant_method": "modelopt"}


def _layer(algorithm: str) -> Json:
    if algorithm == INT4:  # modelopt claims a pre_quant_scale of every such layer, whether it stores one or not
        return {"quant_algo": INT4, "group_size": INT4_BLOCK, "has_zero_point": False, "pre_quant_scale": True}
    return {"quant_algo": algorithm} | ({} if algorithm == FP8 else {"group_size": BLOCK})


def _group(algorithm: str) -> Json:
    if algorithm == INT4:
        return {"weights": {"dynamic": False, "num_bits": 4, "type": "int", "group_size": INT4_BLOCK}}
    if algorithm == FP8:
        return {"input_activations": FLOAT8, "weights": FLOAT8}
    return {"input_activations": FLOAT4, "weights": FLOAT4} if algorithm == NVFP4 else {"weights": FLOAT4}


def _exclude_modules(dense: list[str]) -> list[str]:
    """The dense layers by name, and what engines call them once nested and fused (modelopt's quantize_drafter.py).

    vLLM builds `fc` at `model.fc`, and joins q, k and v into a `qkv_proj`. lm_head is the target's unless it is listed.
    """
    names = set(dense)
    for fused, parts in (("qkv_proj", "qkv"), ("gate_up_proj", ("gate", "up"))):
        for module in dense:
            parent = module.rpartition(".")[0]
            if parent and all(f"{parent}.{part}_proj" in dense for part in parts):
                names.add(f"{parent}.{fused}")
    return sorted(set(dense) | {f"*{name}" for name in names - {HEAD}})
