# SPDX-License-Identifier: Apache-2.0
"""ONNX operators (opset 23) in torch, one function each, and TensorRT's dynamic FP4 quantisation.

A function takes an operator's tensors in their order; attributes, and small constant inputs that are only sizes and
axes, are its keywords. An attribute without a keyword is refused when a graph is loaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from onnx import TensorProto
from torch import Tensor

from dflash_trt.checkpoint.number_formats import BLOCK

FP4, INT4, UINT4 = TensorProto.FLOAT4E2M1, TensorProto.INT4, TensorProto.UINT4
FP8_MAX, FP4_MAX = 448.0, 6.0
TORCH_TYPES: dict[int, torch.dtype] = {
    TensorProto.FLOAT: torch.float32, TensorProto.FLOAT16: torch.float16, TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.FLOAT8E4M3FN: torch.float8_e4m3fn, TensorProto.INT32: torch.int32, TensorProto.INT64: torch.int64,
    TensorProto.INT8: torch.int8, TensorProto.UINT8: torch.uint8, TensorProto.BOOL: torch.bool,
}  # fmt: skip
"""ONNX types that torch has; two codes of 4 bits share a byte, which `unpacked` takes apart."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""FP4's values by the low three bits of their codes; bit 3 is the sign."""


class Operator(NamedTuple):
    """An operator's function, and the names of its constant inputs, which follow the tensors."""

    function: Callable[..., Any]
    constants: tuple[str, ...] = ()

    @property
    def num_tensors(self) -> int | None:
        """Tensors that it takes at most; None for any number."""
        parameters = inspect.signature(self.function).parameters.values()
        if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
            return None
        return sum(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)


OPERATORS: dict[str, Operator] = {}
"""By ONNX name; graphs mean these, whatever the domain."""
Function = Callable[..., Any]


def operator(name: str, *constants: str) -> Callable[[Function], Function]:
    """Makes a function that of the operator `name`, whose last inputs are the keywords `constants`."""

    def register(function: Function) -> Function:
        OPERATORS[name] = Operator(function, constants)
        return function

    return register


@operator("Identity")
def identity(x: Tensor) -> Tensor:
    return x


@operator("Add")
def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


@operator("Sub")
def subtract(x: Tensor, y: Tensor) -> Tensor:
    return x - y


@operator("Mul")
def multiply(x: Tensor, y: Tensor) -> Tensor:
    return x * y


@operator("Div")
def divide(x: Tensor, y: Tensor) -> Tensor:
    """Integers are cut towards 0."""
    return x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


@operator("Sqrt")
def square_root(x: Tensor) -> Tensor:
    return x.sqrt()


@operator("Exp")
def exponential(x: Tensor) -> Tensor:
    return x.exp()


@operator("Max")
def maximum(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(x, y)


@operator("Less")
def less(x: Tensor, y: Tensor) -> Tensor:
    return x < y


@operator("Softmax")
def softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    return x.softmax(axis)


@operator("Sigmoid")
def sigmoid(x: Tensor) -> Tensor:
    return x.sigmoid()


@operator("Tanh")
def tanh(x: Tensor) -> Tensor:
    return x.tanh()


@operator("Softplus")
def softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


@operator("Where")
def where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.where(condition, x, y)


@operator("Cast")
def cast(x: Tensor, *, to: int, saturate: int = 1) -> Tensor:
    return to_fp8(x) if to == TensorProto.FLOAT8E4M3FN and saturate else x.to(TORCH_TYPES[to])


@operator("Reshape", "shape")
def reshape(x: Tensor, *, shape: Sequence[int]) -> Tensor:
    """Extent 0 is that of `x`."""
    return x.reshape([x.shape[axis] if extent == 0 else extent for axis, extent in enumerate(shape)])


@operator("Unsqueeze", "axes")
def unsqueeze(x: Tensor, *, axes: Sequence[int]) -> Tensor:
    rank = x.dim() + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


@operator("Transpose")
def transpose(x: Tensor, *, perm: Sequence[int]) -> Tensor:
    return x.permute(*perm)


@operator("Expand", "shape")
def expand(x: Tensor, *, shape: Sequence[int]) -> Tensor:
    """To the shape that both broadcast to."""
    return x.expand(torch.broadcast_shapes(x.shape, tuple(shape)))  # type: ignore[no-untyped-call]


@operator("Concat")
def concat(*tensors: Tensor, axis: int) -> Tensor:
    return torch.cat(tensors, axis)


@operator("Split", "split")
def split(x: Tensor, *, split: Sequence[int], axis: int = 0) -> tuple[Tensor, ...]:
    return torch.split(x, list(split), axis)


@operator("Slice", "starts", "ends", "axes")
def slices(x: Tensor, *, starts: Sequence[int], ends: Sequence[int], axes: Sequence[int]) -> Tensor:
    for start, end, axis in zip(starts, ends, axes, strict=True):
        x = x[(slice(None),) * (axis % x.dim()) + (slice(start, end),)]
    return x


@operator("Pad", "pads")
def pad(x: Tensor, *, pads: Sequence[int]) -> Tensor:
    """Zeros: `pads` are those before each axis, then those after each; torch counts from the last axis."""
    rank = x.dim()
    return torch.nn.functional.pad(x, [pads[i] for axis in reversed(range(rank)) for i in (axis, rank + axis)])


@operator("Gather")
def gather(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    axis %= x.dim()
    rows = x.index_select(axis, indices.reshape(-1))
    return rows.reshape([*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]])


@operator("ReduceMean", "axes")
def reduce_mean(x: Tensor, *, axes: Sequence[int], keepdims: int = 1) -> Tensor:
    return x.mean(list(axes), keepdim=bool(keepdims))


@operator("ReduceL2", "axes")
def reduce_l2(x: Tensor, *, axes: Sequence[int], keepdims: int = 1) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=list(axes), keepdim=bool(keepdims))
    return norm


@operator("ReduceLogSumExp", "axes")
def reduce_log_sum_exp(x: Tensor, *, axes: Sequence[int], keepdims: int = 1) -> Tensor:
    return x.logsumexp(list(axes), keepdim=bool(keepdims))


@operator("ArgMax")
def arg_max(x: Tensor, *, axis: int = 0, keepdims: int = 1) -> Tensor:
    return x.argmax(axis, keepdim=bool(keepdims))


@operator("TopK", "k")
def top_k(x: Tensor, *, k: Sequence[int], axis: int = -1) -> tuple[Tensor, Tensor]:
    values, indices = x.topk(k[0], axis)
    return values, indices


@operator("MatMul")
def matmul(x: Tensor, y: Tensor) -> Tensor:
    return x @ y


@operator("Gemm")
def gemm(x: Tensor, weight: Tensor, *, transB: int = 0) -> Tensor:  # noqa: N803 - ONNX's name
    return torch.nn.functional.linear(x, weight if transB else weight.T)


@operator("QuantizeLinear")
def quantize(x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """FP8 E4M3 codes: a zero point of that type, which is 0, says so."""
    if zero_point.dtype != torch.float8_e4m3fn:
        raise TypeError(f"QuantizeLinear: expected codes float8_e4m3fn, found {zero_point.dtype}")
    return to_fp8(x.float() / scale.float())


@operator("DequantizeLinear")
def dequantize(
    x: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, axis: int = 1, block_size: int = 0,
    output_dtype: int = TensorProto.UNDEFINED,
) -> Tensor:  # fmt: skip
    """Codes times scales: one for all, one for each of `axis`, or one for a block along it.

    The output's dtype is that of the scales unless `output_dtype` names one.
    """
    axis %= x.dim()
    values = x.float() if zero_point is None else x.float() - zero_point.float()
    if block_size:
        scale = scale.repeat_interleave(block_size, axis)
    elif scale.dim() == 1:
        scale = scale.reshape([-1 if d == axis else 1 for d in range(x.dim())])
    return (values * scale.float()).to(TORCH_TYPES[output_dtype] if output_dtype else scale.dtype)


@operator("TRT_FP4DynamicQuantize")
def quantize_fp4(
    x: Tensor, scale: Tensor, *, axis: int = -1, block_size: int = BLOCK, scale_type: int = TensorProto.FLOAT8E4M3FN
) -> tuple[Tensor, Tensor]:
    """FP4 codes of x [..., K] as FLOAT values, and FP8 scales [..., K / 16] in units of `scale`."""
    if (axis % x.dim(), block_size, scale_type) != (x.dim() - 1, BLOCK, TensorProto.FLOAT8E4M3FN):
        raise TypeError(f"TRT_FP4DynamicQuantize: expected FP8 scales of {BLOCK} along the last axis")
    blocks = x.float().reshape(*x.shape[:-1], -1, BLOCK)
    scales = fp4_scales(blocks.abs().amax(-1), scale)
    return fp4_values(blocks, (scales.float() * scale).unsqueeze(-1)).flatten(-2), scales


def fp4_scales(largest: Tensor, scale: Tensor) -> Tensor:
    """FP8 scales of blocks by their largest magnitudes, in units of `scale`."""
    return to_fp8(largest / (FP4_MAX * scale))


def fp4_values(x: Tensor, unit: Tensor) -> Tensor:
    """The FP4 value nearest to each x / unit; 0 where the unit is."""
    quotient = x.abs() / torch.where(unit == 0, 1.0, unit)
    bounded = torch.where(unit == 0, quotient * 0, quotient).clamp(max=FP4_MAX)
    step = torch.where(bounded < 2, 0.5, torch.where(bounded < 4, 1.0, 2.0))
    return torch.round(bounded / step) * step * x.sign()  # halves go to even, as codes' last bits do


def to_fp8(x: Tensor) -> Tensor:
    """E4M3, to nearest even; larger values become the largest."""
    return x.float().clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def unpacked(packed: Tensor, *, onnx_type: int) -> Tensor:
    """Values [..., K] of UINT8 [..., K / 2], low nibble first: FP8 for FP4, which holds each of its values; or INT8."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    if onnx_type == UINT4:
        return codes.to(torch.int8)
    if onnx_type == INT4:
        return (codes.to(torch.int8) ^ 8) - 8
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], device=packed.device).to(torch.float8_e4m3fn)
    return values.view(torch.uint8)[codes.int()].view(torch.float8_e4m3fn)
