# SPDX-License-Identifier: Apache-2.0
"""Weights in other integer formats, read as BF16: MLX's affine quantisation, and Model Optimizer's INT4 of any group.

MLX: `weight` U32 [out, in * bits / 32], low bits first; w = code * scales + biases, both [out, in / group].
Model Optimizer: `weight` U8 [out / 2, in], the even row in the low nibble, two's complement; w = code * weight_scale,
[out, in / group] F32; AWQ multiplies the input by `pre_quant_scale` [in], here the weight.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dflash_trt.checkpoint.decoded_tensor import DecodedTensor, as_float32, decoded, map_tensor
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.quantization import DENSE_DTYPES
from dflash_trt.checkpoint.safetensors_file import StoredTensor, Weights
from dflash_trt.errors import CheckpointError, human_bytes

Floats = NDArray[np.float32]
MLX_BITS = (4, 8)  # affine; nvfp4: findings/mlx_nvfp4_without_a_global_scale_loses_small_weights.sh
SERVED = "mlx-lm serves this draft; for dflash-trt give the checkpoint that it was quantised from"


def read_mlx(section: Facts, tensors: Weights) -> tuple[Weights, str]:
    """The tensors, every packed weight as a DecodedTensor, and a description of how they are stored.

    The width of a layer's codes follows from its tensors, which mlx-lm's sections for single layers must agree with.
    Raises CheckpointError for another mode or width, and tensors that do not fit.
    """
    if "mode" in section and section.text("mode") != "affine":
        raise section.error("mode", "affine, which is read", SERVED)
    modules = [name.removesuffix(".scales") for name in tensors if name.endswith(".scales")]
    left, dense, widths = dict(tensors), Weights(), set[str]()
    for module in modules:
        parts = {part: left.pop(f"{module}.{part}", None) for part in ("weight", "scales", "biases")}
        dense[f"{module}.weight"], width = _mlx_weight(section, module, parts)
        widths.add(width)
    if not dense:
        raise section.error("bits", "packed weights with scales, of which there are none", SERVED)
    return left | dense, _description(f"MLX {' and '.join(sorted(widths))}", dense)


def _mlx_weight(section: Facts, module: str, parts: dict[str, StoredTensor | None]) -> tuple[DecodedTensor, str]:
    weight, scales, biases = (parts[name] for name in ("weight", "scales", "biases"))
    own = section.section(module) if section.peek(module) else section
    group, bits = own.integer("group_size"), own.integer("bits")
    if bits not in MLX_BITS:
        raise own.error("bits", " or ".join(map(str, MLX_BITS)), SERVED)
    if weight is None or scales is None or biases is None:
        missing = next(name for name, tensor in parts.items() if tensor is None)
        raise CheckpointError(f"{section.file.parent}: missing tensor {module}.{missing}, part of a packed weight")
    if weight.dtype != "U32" or len(weight.shape) != 2 or scales.shape != biases.shape or 0 in weight.shape:
        raise weight.error(f"U32 [out, in * {bits} / 32]")
    rows, columns = weight.shape[0], weight.shape[1] * 32 // bits
    if (
        columns % group
        or scales.shape != (rows, columns // group)
        or not {scales.dtype, biases.dtype} <= {*DENSE_DTYPES}
    ):
        raise scales.error(f"a scale for each {group} of {columns} columns of {rows} rows")
    codes = _words(weight, bits)

    def decode(begin: int, end: int) -> Floats:
        scale, bias = (as_float32(map_tensor(each)[begin:end]).repeat(group, axis=1) for each in (scales, biases))
        with np.errstate(all="ignore"):
            return codes(begin, end) * scale + bias

    stored = weight.num_bytes + scales.num_bytes + biases.num_bytes
    tensor = decoded(weight.file, f"{module}.weight", (rows, columns), decode, f"MLX{bits}", stored)
    return tensor, f"{bits} bits, groups of {group}"


def read_int4(tensors: Weights) -> tuple[Weights, str]:
    """The tensors, every INT4 weight as a DecodedTensor, and a description; CheckpointError where they do not fit."""
    left, dense, groups = dict(tensors), Weights(), set[int]()
    for name in tensors:
        module = name.removesuffix(".weight")
        scale = tensors.get(f"{module}.weight_scale")
        if name == module or tensors[name].dtype != "U8" or scale is None or scale.dtype != "F32":
            continue
        weight, scale = left.pop(name), left.pop(f"{module}.weight_scale")
        awq = left.pop(f"{module}.pre_quant_scale", None)
        dense[name] = _int4_weight(weight, scale, awq)
        groups.add(weight.shape[1] // scale.shape[1])
    sizes = " and ".join(map(str, sorted(groups)))
    return left | dense, _description(f"Model Optimizer's INT4, groups of {sizes}", dense)


def _int4_weight(weight: StoredTensor, scale: StoredTensor, awq: StoredTensor | None) -> DecodedTensor:
    if len(weight.shape) != 2 or len(scale.shape) != 2 or 0 in (*weight.shape, *scale.shape):
        raise weight.error("U8 [out / 2, in]")
    rows, columns = 2 * weight.shape[0], weight.shape[1]
    if scale.dtype != "F32" or scale.shape[0] != rows or columns % scale.shape[1]:
        raise scale.error(f"F32 [{rows}, a divisor of {columns}]")
    if awq is not None and (awq.dtype not in DENSE_DTYPES or awq.shape != (columns,)):
        raise awq.error(f"a factor for each of {columns} columns")
    group = columns // scale.shape[1]
    packed = np.memmap(weight.file, np.uint8, "r", weight.offset, weight.shape)

    def decode(begin: int, end: int) -> Floats:
        pairs = packed[begin // 2 : (end + 1) // 2]
        nibbles = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1, columns).astype(np.int8)
        codes = (nibbles - 16 * (nibbles > 7))[begin % 2 :][: end - begin].astype(np.float32)
        factor = as_float32(map_tensor(scale)[begin:end]).repeat(group, axis=1)
        with np.errstate(all="ignore"):
            values: Floats = codes * factor
            return values if awq is None else values * as_float32(map_tensor(awq))

    stored = weight.num_bytes + scale.num_bytes + (0 if awq is None else awq.num_bytes)
    return decoded(weight.file, weight.name, (rows, columns), decode, "INT4", stored)


def _words(weight: StoredTensor, bits: int) -> Callable[[int, int], Floats]:
    """A function that returns rows of codes as numbers, those of a word from its low bits on."""
    width = weight.num_bytes // weight.shape[0]

    def read(begin: int, end: int) -> Floats:
        raw = np.memmap(weight.file, np.uint8, "r", weight.offset + begin * width, (end - begin, width))
        codes = np.stack([raw & 15, raw >> 4], axis=-1).reshape(len(raw), -1) if bits == 4 else raw
        return codes.astype(np.float32)

    return read


def _description(what: str, dense: Weights) -> str:
    size = human_bytes(sum(each.stored_bytes for each in dense.values() if isinstance(each, DecodedTensor)))
    return f"{what}: {len(dense)} layers, {size}, read as BF16"
