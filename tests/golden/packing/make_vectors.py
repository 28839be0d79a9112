# SPDX-License-Identifier: Apache-2.0
"""Writes vectors.npz: weights, and what NVIDIA modelopt 0.47 exports for them.

    python -m tests.golden.packing.make_vectors

Needs torch, ml_dtypes, nvidia-modelopt 0.47 and its undeclared huggingface_hub and requests.
"""

from __future__ import annotations

import copy
from pathlib import Path

import modelopt
import modelopt.torch.quantization as mtq
import numpy as np
import torch
from modelopt.torch.export.unified_export_hf import _export_quantized_weight
from numpy.typing import NDArray

from tests.golden.packing.cases import cases

TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
CONFIGS = {"fp8": mtq.FP8_DEFAULT_CFG, "nvfp4": mtq.NVFP4_DEFAULT_CFG}


def typed_cases(rows: int, columns: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The cases rounded to `dtype`."""
    info = torch.finfo(dtype)
    made = cases(rows, columns, step=info.eps, smallest=info.smallest_normal * info.eps)
    return {name: torch.from_numpy(weights).to(dtype) for name, weights in made.items()}


def as_numpy(tensor: torch.Tensor) -> NDArray[np.generic]:
    """The tensor's bits as numpy holds them: BF16 as uint16, e4m3 as uint8."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).numpy()
    return tensor.numpy()


def export(weights: torch.Tensor, quantization: str) -> dict[str, NDArray[np.generic]]:
    """Tensors of the unified Hugging Face export for a linear layer with these weights."""
    linear = torch.nn.Linear(weights.shape[1], weights.shape[0], bias=False, dtype=weights.dtype)
    linear.weight.data = weights.clone()
    probe = torch.ones(1, weights.shape[1], dtype=weights.dtype)
    model = torch.nn.Sequential(linear)
    mtq.quantize(model, copy.deepcopy(CONFIGS[quantization]), lambda net: net(probe))
    _export_quantized_weight(model[0], weights.dtype)
    names = ("weight", "weight_scale", "weight_scale_2")
    return {name: as_numpy(getattr(model[0], name).data) for name in names if hasattr(model[0], name)}


def main() -> None:
    """Writes the vectors beside this file."""
    vectors = {"modelopt": np.array(modelopt.__version__)}
    for type_name, dtype in TYPES.items():
        for case, weights in typed_cases(12, 192, dtype).items():
            vectors[f"{type_name}.{case}"] = as_numpy(weights)
            for quantization in CONFIGS:
                for name, array in export(weights, quantization).items():
                    vectors[f"{type_name}.{case}.{quantization}.{name}"] = array
    np.savez_compressed(Path(__file__).parent / "vectors.npz", **vectors)


if __name__ == "__main__":
    main()
