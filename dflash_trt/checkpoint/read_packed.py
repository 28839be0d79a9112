# SPDX-License-Identifier: Apache-2.0
"""Presents weights that other quantisers packed as BF16, whatever their format."""

from __future__ import annotations

from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.number_formats import INT4_BLOCK
from dflash_trt.checkpoint.quantization import SECTION, is_compressed
from dflash_trt.checkpoint.safetensors_file import Weights
from dflash_trt.errors import CheckpointError

MLX_SECTIONS = ("quantization", "quantization_config")


def read_packed(config: Facts, tensors: Weights) -> tuple[Weights, str | None, Facts]:
    """The tensors with packed weights as DecodedTensors, how they are stored, and config.json without that section.

    The description is None where nothing is decoded. Raises CheckpointError for schemes that are not read.
    """
    if is_compressed(config):
        from dflash_trt.checkpoint.compressed_tensors import read_compressed

        return *read_compressed(config, tensors), _without(config, SECTION)
    if packed := [name for name in tensors if name.endswith(".weight_packed")]:
        raise CheckpointError(
            f"{config.file}: missing {SECTION}, the scheme by which {packed[0]!r} is packed",
            hint="copy config.json again from the checkpoint that the weights came with",
        )
    if is_mlx(config):
        from dflash_trt.checkpoint.affine import read_mlx

        section = config.section(next(name for name in MLX_SECTIONS if config.peek(name)))
        return *read_mlx(section, tensors), _without(config, *MLX_SECTIONS)
    if is_int4(tensors):
        from dflash_trt.checkpoint.affine import read_int4

        return *read_int4(tensors), _without(config, SECTION)
    return tensors, None, config


def is_mlx(config: Facts) -> bool:
    """Whether config.json has mlx-lm's section: group_size and bits, without a quant_method."""
    section = config.peek(MLX_SECTIONS[0]) or config.peek(MLX_SECTIONS[1])
    return "bits" in section and "group_size" in section and "quant_method" not in section


def is_int4(tensors: Weights) -> bool:
    """Whether there are INT4 weights of Model Optimizer that engines do not take as they are stored."""
    return any(_is_foreign_int4(name, tensors) for name in tensors)


def _is_foreign_int4(name: str, tensors: Weights) -> bool:
    """Whether `name` is such a weight: groups of another size than 32 columns, or scaled inputs."""
    module, _, end = name.rpartition(".")
    weight, scale = tensors[name], tensors.get(f"{module}.weight_scale")
    if end != "weight" or weight.dtype != "U8" or scale is None or scale.dtype != "F32":
        return False
    if len(weight.shape) != 2 or len(scale.shape) != 2 or scale.shape[0] != 2 * weight.shape[0]:
        return False
    return f"{module}.pre_quant_scale" in tensors or scale.shape[1] * INT4_BLOCK != weight.shape[1]


def _without(config: Facts, *keys: str) -> Facts:
    return Facts({key: value for key, value in config.values().items() if key not in keys}, config.file)
