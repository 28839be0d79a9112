# SPDX-License-Identifier: Apache-2.0
"""Number formats of quantised linear layers: one entry for each, from which reader, writer, sizes and checks are made.

Layouts are those of modelopt 0.47 (`modelopt.torch.export`). A weight is code * weight_scale * weight_scale_2.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

FP8, NVFP4, W4A16_NVFP4, INT4 = "FP8", "NVFP4", "W4A16_NVFP4", "W4A16_AWQ"
"""modelopt's names; INT4 weights have this one, however their scales were found."""
BLOCK, INT4_BLOCK = 16, 32
E2M1_MAX, E4M3_MAX = 6.0, 448.0
FP8_SM, FP4_SM = (8, 9), (10, 0)
"""First GPUs whose tensor cores read codes of 8 and of 4 bits (TensorRT support matrix)."""
Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Stored type and shape by name."""


class NumberFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How the weights [out, in] of a layer are stored, and what reads them."""

    name: str
    codes: str
    """Type of the tensor `weight`, as safetensors calls it."""
    rows_per_byte: int = 1
    columns_per_byte: int = 1
    """Codes that share a byte; the first is in the low bits."""
    kind: str = "float"
    num_bits: int
    largest: float
    """Largest magnitude of a code."""
    block: int | None = None
    """Neighbours in a row that share a scale; None for one scale of the whole tensor."""
    scale_type: str = "F32"
    """Type of `weight_scale`."""
    tensor_scale: str | None = None
    """Name of the scalar that scales the whole tensor; None where there are scales of blocks alone."""
    quantises_input: bool
    """Whether activations are quantised, too, and `input_scale` holds their range."""
    plan_bits: float
    """Bits of a weight in a TensorRT plan, scales included."""
    lowest_sm: tuple[int, int] | None = None
    """First GPUs whose tensor cores read it; None where kernels dequantise it in passing."""
    claims: Mapping[str, bool] = {}
    """Further keys of modelopt's configuration."""

    @property
    def scale_range(self) -> float:
        """Largest magnitude of a weight over the scale of the whole tensor."""
        return self.largest * E4M3_MAX if self.scale_type == "F8_E4M3" else self.largest

    def tensors(self, rows: int, columns: int) -> Tensors:
        """The tensors that take the place of a dense weight [rows, columns]."""
        tensors: Tensors = {"weight": (self.codes, (rows // self.rows_per_byte, columns // self.columns_per_byte))}
        if self.block is not None:
            tensors["weight_scale"] = (self.scale_type, (rows, columns // self.block))
        scalars = [self.tensor_scale] if self.tensor_scale else []
        scalars += ["input_scale"] if self.quantises_input else []
        return tensors | dict.fromkeys(scalars, ("F32", ()))


FORMATS = {
    each.name: each
    for each in (
        NumberFormat(
            name=FP8, codes="F8_E4M3", num_bits=8, largest=E4M3_MAX, tensor_scale="weight_scale", quantises_input=True,
            plan_bits=8.0, lowest_sm=FP8_SM,
        ),
        NumberFormat(
            name=NVFP4, codes="U8", columns_per_byte=2, num_bits=4, largest=E2M1_MAX, block=BLOCK,
            scale_type="F8_E4M3", tensor_scale="weight_scale_2", quantises_input=True, plan_bits=4.5, lowest_sm=FP4_SM,
        ),
        NumberFormat(
            name=W4A16_NVFP4, codes="U8", columns_per_byte=2, num_bits=4, largest=E2M1_MAX, block=BLOCK,
            scale_type="F8_E4M3", tensor_scale="weight_scale_2", quantises_input=False, plan_bits=4.5,
            lowest_sm=FP4_SM,
        ),
        # modelopt claims a pre_quant_scale of every such layer, whether it stores one or not.
        NumberFormat(
            name=INT4, codes="U8", rows_per_byte=2, kind="int", num_bits=4, largest=8.0, block=INT4_BLOCK,
            quantises_input=False, plan_bits=4.5, claims={"has_zero_point": False, "pre_quant_scale": True},
        ),
    )
}  # fmt: skip
ACTIVATION_ALGORITHMS = tuple(name for name, each in FORMATS.items() if each.quantises_input)
"""Formats that quantise a layer's input, too, and thus need its range."""
