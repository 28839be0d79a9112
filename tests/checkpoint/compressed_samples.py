# SPDX-License-Identifier: Apache-2.0
"""Drafts whose linear layers llm-compressor would have packed: by a packer of the tests' own, or by compressed-tensors.

Each writer replaces model.safetensors and returns what the packed weights mean, in float32 by tensor name.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tests.checkpoint.samples import edit_config

Tensors = dict[str, torch.Tensor]
Meant = dict[str, NDArray[np.float32]]


def linear_modules(tensors: Tensors) -> list[str]:
    """fc and the projections of attention and MLP."""
    ends = ("_proj.weight", "fc.weight")
    names = [name for name in tensors if name.endswith(ends) and name.count(".") in (1, 4)]
    return [name.removesuffix(".weight") for name in names]


def claims(kind: str, **weights: object) -> dict[str, Any]:
    """quantization_config of one group."""
    return {
        "quant_method": "compressed-tensors", "format": kind, "quantization_status": "compressed",
        "ignore": ["lm_head"], "global_compression_ratio": None, "kv_cache_scheme": None, "version": "0.20.0",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None,
                                      "output_activations": None}},
    }  # fmt: skip


def pack_words(codes: NDArray[np.int64], bits: int) -> NDArray[np.int32]:
    """Codes [R, C] >= 0 as I32 [R, ceil(C * bits / 32)], the first in the lowest bits."""
    per_word = 32 // bits
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % per_word))).astype(np.uint64)
    parts = padded.reshape(len(codes), -1, per_word) << (np.arange(per_word, dtype=np.uint64) * bits)
    return parts.sum(axis=-1).astype(np.uint32).view(np.int32)


def write_packed(draft: Path, *, bits: int = 4, group: int = 16, symmetric: bool = True) -> Meant:
    """pack-quantized, rounded to nearest, without the package."""
    file, meant, most = draft / "model.safetensors", Meant(), 2**bits - 1
    tensors = load_file(file)
    for module in linear_modules(tensors):
        weight = tensors.pop(f"{module}.weight").double().numpy()
        rows, columns = weight.shape
        groups = weight.reshape(rows, -1, group)
        low, high = groups.min(-1).clip(max=0), groups.max(-1).clip(min=0)
        span = 2 * np.maximum(-low, high) if symmetric else high - low
        scales = torch.tensor(span / most).bfloat16()
        steps = np.maximum(scales.double().numpy(), 1e-30)
        points = np.full(low.shape, 2 ** (bits - 1)) if symmetric else np.rint(-low / steps).clip(0, most).astype(int)
        codes = (np.rint(groups / steps[..., None]) + points[..., None]).clip(0, most).astype(int)
        tensors |= {
            f"{module}.weight_packed": torch.from_numpy(pack_words(codes.reshape(weight.shape), bits)),
            f"{module}.weight_scale": scales,
            f"{module}.weight_shape": torch.tensor([rows, columns]),
        }
        if not symmetric:
            tensors[f"{module}.weight_zero_point"] = torch.from_numpy(pack_words(points.T, bits).T.copy())
        exact = (codes - points[..., None]) * scales.double().numpy()[..., None]
        meant[f"{module}.weight"] = torch.from_numpy(exact.reshape(weight.shape)).bfloat16().float().numpy()
    save_file(tensors, file)
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group}
    edit_config(draft, quantization_config=claims("pack-quantized", **weights))
    return meant


def write_compressed(draft: Path, kind: str, dtype: torch.dtype, *, dynamic: bool | None, **arguments: Any) -> Meant:
    """By compressed-tensors' own compressor of format `kind`, scales of type `dtype`; meant is what it decompresses."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    args = QuantizationArgs(**arguments)
    inputs = None
    if dynamic is not None:
        strategy = "token" if dynamic else "tensor"
        inputs = QuantizationArgs(num_bits=args.num_bits, type=args.type, strategy=strategy, dynamic=dynamic)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=inputs)
    compressor = BaseCompressor.get_value_from_registry(kind)
    file, meant = draft / "model.safetensors", Meant()
    tensors = load_file(file)
    for module in linear_modules(tensors):
        weight = tensors.pop(f"{module}.weight").to(dtype)
        packed = compressor.compress({"weight": weight, **_parameters(weight, args)}, scheme)
        if dynamic is False:
            packed["input_scale"] = torch.tensor([0.5], dtype=dtype)
        meant[f"{module}.weight"] = compressor.decompress(packed, scheme)["weight"].float().numpy()
        tensors |= {f"{module}.{name}": value.contiguous() for name, value in packed.items()}
    save_file(tensors, file)
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=kind, quantization_status="compressed", ignore=["lm_head"]
    )
    edit_config(draft, quantization_config=config.model_dump(mode="json"))
    return meant


def _parameters(weight: torch.Tensor, args: Any) -> Tensors:
    """Scales and zero points of a weight, by the package's own formula."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    rows, columns = weight.shape
    height, width = {
        "tensor": (rows, columns), "channel": (1, columns), "group": (1, args.group_size),
        "tensor_group": (1, args.group_size), "block": args.block_structure,
    }[args.strategy]  # fmt: skip
    whole = torch.nn.functional.pad(weight.float(), (0, -columns % width, 0, -rows % height))
    blocks = whole.reshape(whole.shape[0] // height, height, -1, width)
    low, high = blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))
    common = generate_gparam(weight.min(), weight.max()).reshape(1) if args.strategy == "tensor_group" else None
    scale, point = calculate_qparams(low, high, args, common)
    scale = scale if common is not None else scale.to(weight.dtype)
    if args.strategy == "tensor":
        scale, point = scale.reshape(1), point.reshape(1)
    return {"weight_scale": scale, "weight_zero_point": point} | (
        {} if common is None else {"weight_global_scale": common.float()}
    )
