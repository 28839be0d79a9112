# SPDX-License-Identifier: Apache-2.0
"""How compressed-tensors 0.20 stores the weights of a module: format, width and groups that share a scale."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

PACKED, INT, FLOAT, NAIVE, NVFP4 = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
)  # fmt: skip
FORMATS = (PACKED, INT, FLOAT, NAIVE, NVFP4)
MAX_BLOCK = 2**31 - 1


class WeightArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`weights` of a group (QuantizationArgs); fields that are not read here do not change the stored weights."""

    num_bits: Literal[4, 8]
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    strategy: Literal["tensor", "channel", "group", "tensor_group", "block"] | None = None
    group_size: int | None = None
    block_structure: tuple[int, int] | str | None = None
    dynamic: Literal[False] = False
    actorder: Literal["weight", "static", False] | None = None
    scale_dtype: str | None = None
    zp_dtype: str | None = None
    observer: str | None = None
    observer_kwargs: dict[str, Any] | None = None

    @property
    def block(self) -> tuple[int | None, int | None]:
        """Rows and columns that share a scale; None for all of them."""
        match self.strategy or ("tensor" if not self.group_size else "group" if self.group_size > 0 else "channel"):
            case "block":
                text = self.block_structure
                rows, columns = map(int, text.split("x")) if isinstance(text, str) else text or (0, 0)
                return rows, columns
            case "group" | "tensor_group":
                return 1, self.group_size or 0
            case "channel":
                return 1, None
            case _:
                return None, None

    def check(self) -> None:
        """Raises ValueError for sizes of groups or blocks out of range."""
        if wrong := [size for size in self.block if size is not None and not 1 <= size <= MAX_BLOCK]:
            raise ValueError(f"sizes of groups and blocks are 1 to {MAX_BLOCK}, not {wrong[0]}")

    def __str__(self) -> str:
        """'int4, groups of 128, symmetric'."""
        rows, columns = self.block
        scales = f"groups of {columns}" if columns and rows == 1 else f"blocks of {rows} x {columns}"
        if columns is None:
            scales = "a scale for each row" if rows else "one scale"
        signs = "" if self.type == "float" else ", symmetric" if self.symmetric else ", with zero points"
        return f"{self.type}{self.num_bits}, {scales}{signs}"


class Scheme(msgspec.Struct, frozen=True, kw_only=True):
    """How one module is stored."""

    weights: WeightArguments
    format: str
    activations: str
    """Quantisation of activations, for people: "", or "; activations float8, dynamic"."""

    def __str__(self) -> str:
        """'pack-quantized (int4, groups of 128, symmetric)'."""
        return f"{self.format} ({self.weights}{self.activations})"
