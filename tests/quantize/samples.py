# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints read back by other means than the package's own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, read_draft
from dflash_trt.checkpoint.safetensors_file import StoredTensor
from dflash_trt.checkpoint.weights import read_weights
from dflash_trt.quantize.convert import Summary, quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe

DTYPES = {
    "BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "U8": np.uint8, "I64": np.int64,
}  # fmt: skip
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])

Array = NDArray[np.generic]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """A draft and the checkpoint that a recipe made from it."""

    draft: DraftCheckpoint
    quantised: DraftCheckpoint
    summary: Summary


def convert(source: Path, output: Path, recipe: str, **options: Any) -> Case:
    """Quantises `source` by the recipe of that name and reads the result."""
    draft = read_draft(source)
    summary = quantize_checkpoint(draft, load_recipe(recipe), output, **options)
    return Case(draft, read_draft(output), summary)


def raw(tensor: StoredTensor) -> bytes:
    """The bytes of a tensor."""
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.offset)
        return stream.read(tensor.num_bytes)


def arrays(directory: Path) -> dict[str, Array]:
    """Every tensor of a checkpoint."""
    return {
        name: np.frombuffer(raw(tensor), DTYPES[tensor.dtype]).reshape(tensor.shape)
        for name, tensor in read_weights(directory).items()
    }


def dequantised(tensors: dict[str, Array], module: str) -> Floats:
    """code * weight_scale * weight_scale_2 of a module, [out, in] float64."""
    weight = tensors[f"{module}.weight"]
    if weight.dtype != np.uint8:
        return weight.astype(np.float64) * tensors[f"{module}.weight_scale"].astype(np.float64)
    if f"{module}.weight_scale_2" not in tensors:
        scales = tensors[f"{module}.weight_scale"].astype(ml_dtypes.bfloat16)  # in the graph's type
        return unpacked_int4(weight, scales.astype(np.float64))
    codes = np.stack([weight & 15, weight >> 4], axis=-1).reshape(len(weight), -1)
    scales = tensors[f"{module}.weight_scale"].astype(np.float64) * tensors[f"{module}.weight_scale_2"]
    return E2M1[codes] * np.repeat(scales, 16, axis=1)


def unpacked_fp8(codes: Array, scale: float) -> NDArray[np.float32]:
    """e4m3(code) * scale, in float32."""
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(scale)


def unpacked_nvfp4(data: Array, scales: Array, scale_2: float) -> NDArray[np.float32]:
    """e2m1(code) * (e4m3(block scale) * scale_2), in float32; the low nibble first."""
    codes = np.stack([data & 15, data >> 4], axis=-1).reshape(len(data), -1)
    return E2M1.astype(np.float32)[codes] * unpacked_fp8(scales, scale_2).repeat(16, axis=1)


def unpacked_int4(data: Array, scales: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    """code * block scale, of the scales' type; the low nibbles of a row of bytes are the even row of codes."""
    rows, columns = len(scales), data.shape[1]
    pairs = np.stack([data & 15, data >> 4], axis=1).reshape(rows, columns).astype(np.int8)
    return (pairs - 16 * (pairs > 7)).astype(scales.dtype) * scales.repeat(32, axis=1)


def rounded_fp8(weights: Array, scale: np.float32) -> Floats:
    """e4m3(w / scale) * scale by ml_dtypes."""
    quotient = (weights.astype(np.float32) / scale).clip(-448, 448)
    return quotient.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * np.float64(scale)


def rounded_nvfp4(weights: Array, scale_2: np.float32) -> Floats:
    """e2m1 in blocks of 16 with e4m3 scales, by ml_dtypes."""
    blocks = weights.astype(np.float32).reshape(len(weights), -1, 16)
    scales = np.abs(blocks).max(axis=-1, keepdims=True) / (np.float32(6) * scale_2)
    scales = np.where(scales == 0, np.float32(1), scales).clip(2**-9, 448).astype(ml_dtypes.float8_e4m3fn)
    divisor = scales.astype(np.float32) * scale_2
    codes = (blocks / divisor).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn)
    exact = codes.astype(np.float64) * (scales.astype(np.float64) * np.float64(scale_2))
    return exact.reshape(weights.shape)


def int4_formula(weights: Array) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Codes [R, K] and scales [R, K / 32] of the format's definition, by rounding with ml_dtypes."""
    blocks = weights.astype(np.float32).reshape(len(weights), -1, 32)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    codes, scales = np.zeros(blocks.shape, np.int8), np.ones(largest.shape, np.float32)
    least = np.full(largest.shape, np.inf)
    for steps in (7, 7.25, 7.5, 7.75, 8):
        scale = (largest / np.float32(steps)).astype(ml_dtypes.bfloat16).astype(np.float32)
        code = np.rint((blocks / np.where(scale == 0, np.float32(1), scale)).clip(-8, 7))
        with np.errstate(over="ignore"):
            error = (blocks - code * scale).astype(np.float64)
        loss = np.cumsum(error * error, axis=-1)[..., -1:]  # one after the other
        is_better = (loss < least) & (scale > 0)
        codes, scales = np.where(is_better, code, codes).astype(np.int8), np.where(is_better, scale, scales)
        least = np.where(is_better, loss, least)
    return codes.reshape(weights.shape), scales[..., 0]


def rounded_int4(weights: Array) -> Floats:
    """Integers of -8 to 7 in blocks of 32 with bfloat16 scales."""
    codes, scales = int4_formula(weights)
    return codes * scales.astype(np.float64).repeat(32, axis=1)
