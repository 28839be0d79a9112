# SPDX-License-Identifier: Apache-2.0
"""Packs the weights of a layer: which layers can be packed, and the tensors that are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_trt._C import pack_fp8, pack_int4, pack_nvfp4
from dflash_trt.checkpoint import number_formats
from dflash_trt.checkpoint.decoded_tensor import as_float32
from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, refuse_quantised
from dflash_trt.checkpoint.number_formats import FORMATS
from dflash_trt.checkpoint.safetensors_file import StoredTensor
from dflash_trt.checkpoint.safetensors_writer import SafetensorsWriter
from dflash_trt.errors import CheckpointError
from dflash_trt.quantize.scales import naming

FLOAT_ELEMENTS = 1 << 19
"""Weights that are widened to FLOAT at a time: 2 MB."""


def check_quantisable(draft: DraftCheckpoint, algorithms: Mapping[str, str]) -> None:
    """Raises CheckpointError for a draft that is quantised already, or a layer that does not suit its algorithm."""
    refuse_quantised(draft)
    for module, algorithm in algorithms.items():
        tensor = draft.weights[f"{module}.weight"]
        rows, columns = tensor.shape
        number_format = FORMATS[algorithm]
        if columns % (block := number_format.block or 1):
            found = f"columns in multiples of {block} for {algorithm}, found {columns}"
        elif rows % number_format.rows_per_byte:
            found = f"an even number of rows for {algorithm}, found {rows}"
        else:
            continue
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name!r}: expected {found}",
            hint=f"give {module} the algorithm FP8 or none in a recipe of your own",
        )


def pack(
    writer: SafetensorsWriter, module: str, tensor: StoredTensor, weights: NDArray[Any], algorithm: str,
    scale: np.float32 | None, threads: int, *, like_modelopt: bool = False,
) -> None:  # fmt: skip
    """Writes the codes and scales of `module`, whose `weights` are those of `tensor`, or some of its rows.

    `scale` is that of the whole tensor, None for a format without one. FP8 codes are the nearest to weight / scale;
    with `like_modelopt` the quotient is first rounded to the weights' dtype, as modelopt 0.47 exports.
    """
    sizes = FORMATS[algorithm].tensors(*weights.shape)
    codes = np.empty(sizes["weight"][1], np.uint8)
    with naming(tensor):  # the file may have changed since its ranges were read
        match algorithm:
            case number_formats.INT4:
                scales = np.empty(sizes["weight_scale"][1], np.float32)
                pack_int4(weights, codes, scales, threads=threads)
                writer.write(f"{module}.weight_scale", scales)
            case number_formats.FP8:
                assert scale is not None
                step = len(weights) if like_modelopt else max(1, FLOAT_ELEMENTS // weights.shape[1])
                for begin in range(0, len(weights), step):
                    rows, out = weights[begin : begin + step], codes[begin : begin + step]
                    pack_fp8(rows if like_modelopt else as_float32(rows), float(scale), out, threads=threads)
                writer.write(f"{module}.weight_scale", scale)
            case number_formats.NVFP4 | number_formats.W4A16_NVFP4:
                assert scale is not None
                block_scales = np.empty(sizes["weight_scale"][1], np.uint8)
                pack_nvfp4(weights, float(scale), codes, block_scales, threads=threads)
                writer.write(f"{module}.weight_scale", block_scales)
                writer.write(f"{module}.weight_scale_2", scale)
            case _:
                raise AssertionError(f"no packer for {algorithm}")
    writer.write(f"{module}.weight", codes)
