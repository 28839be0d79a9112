# SPDX-License-Identifier: Apache-2.0
"""Linear layers, dense and quantised, several stacked into one GEMM.

A layer is a `Gemm` on 2-D activations with weights [out, in] as in the checkpoint: TensorRT's parser turns it into one
matrix multiplication, which the builder fuses with the dequantisation of its operands. The quantised patterns are those
of modelopt 0.47 (modelopt/torch/quantization/export_onnx.py, modelopt/onnx/export/nvfp4_exporter.py). INT4 is a
`MatMul`. Compiled by TensorRT-RTX's builder on a CPU; not yet run on a GPU.
"""

from __future__ import annotations

from onnx import TensorProto

from dflash_trt.checkpoint import number_formats
from dflash_trt.checkpoint.number_formats import BLOCK, INT4_BLOCK
from dflash_trt.checkpoint.quantization import read_scale
from dflash_trt.engine.graph.onnx_builder import COMPUTE, TRT_DOMAIN, GraphBuilder


def linear(g: GraphBuilder, x: str, *modules: str, is_quantized: bool = False) -> str:
    """x [rows, in] -> [rows, sum of outs] for the modules' weights [out, in], plus their biases, if any.

    Modules that are quantised alike share one GEMM; others have one each, and their outputs are joined. `is_quantized`:
    x is already FP8, with the scale of the single module.
    """
    y = product(g, x, *modules, is_quantized=is_quantized)
    biases = stacked_biases(g, *modules)
    return y if biases is None else g.op("Add", y, biases)


def partial_linear(g: GraphBuilder, x: str, module: str, *, is_quantized: bool = False) -> str:
    """`linear` of one module; in a shard without the bias, which is added after the ranks' sum."""
    return (product if g.is_shard else linear)(g, x, module, is_quantized=is_quantized)


def product(g: GraphBuilder, x: str, *modules: str, is_quantized: bool = False) -> str:
    """`linear` without biases."""
    if can_stack(g, modules):
        return _gemm(g, x, modules, is_quantized=is_quantized)
    return g.op("Concat", *(_gemm(g, x, (module,)) for module in modules), axis=-1)


def stacked_biases(g: GraphBuilder, *modules: str) -> str | None:
    """Concatenated biases of stacked modules; 0 for a module without one, None if no module has one."""
    names = [f"{module}.bias" for module in modules]
    if not any(name in g.weights for name in names):
        return None
    if all(name in g.weights for name in names):
        return g.stacked(names)
    rows = {name: g.weights[f"{module}.weight"].shape[0] for name, module in zip(names, modules, strict=True)}
    return g.op("Concat", *(g.weight(n) if n in g.weights else g.zero(COMPUTE, rows[n]) for n in names), axis=0)


def can_stack(g: GraphBuilder, modules: tuple[str, ...]) -> bool:
    """Whether modules can share one GEMM: dense ones always, quantised ones side by side with a common scale."""
    is_dense = g.algorithm(modules[0]) is None
    return g.draft.scaled_alike(modules) and (is_dense or g.adjacent([f"{module}.weight" for module in modules]))


def fp8_input_scale(g: GraphBuilder, module: str) -> float | None:
    """The scale of the FP8 input of `module`; None if the input is not FP8."""
    return _input_scale(g, (module,)) if g.algorithm(module) == number_formats.FP8 else None


def _gemm(g: GraphBuilder, x: str, modules: tuple[str, ...], *, is_quantized: bool = False) -> str:
    weights = [f"{module}.weight" for module in modules]
    if not is_quantized:  # calibration finds the modules' input by this name
        x = g.named("Identity", x, name=input_name(modules[0]))
    match g.algorithm(modules[0]):
        case None:
            weight = g.stacked(weights)
        case number_formats.FP8:
            x = _fp8_activation(g, x, _input_scale(g, modules), is_quantized=is_quantized)
            # One scale: findings/tensorrt_rtx_scales_fp8_channels_after_the_gemm.sh
            scale = g.constant(read_scale(g.weights[f"{modules[0]}.weight_scale"]))
            weight = g.op("DequantizeLinear", g.stored(weights), scale, output_dtype=COMPUTE)
        case number_formats.INT4:
            rows = sum(2 * g.weights[name].shape[0] for name in weights)
            return g.op("MatMul", x, _int4_weight(g, modules, rows))
        case number_formats.NVFP4:
            x = _nvfp4_activation(g, x, _input_scale(g, modules))
            weight = _nvfp4_weight(g, modules)
        case number_formats.W4A16_NVFP4:
            weight = _nvfp4_weight(g, modules)
        case algorithm:
            raise AssertionError(f"no nodes for {algorithm}")
    return g.op("Gemm", x, weight, transB=1)


def input_name(module: str) -> str:
    """Name of the value that is multiplied with the weights of `module` and the modules stacked after it."""
    return f"{module}/input"


def _input_scale(g: GraphBuilder, modules: tuple[str, ...]) -> float:
    """The widest range of the stacked modules, which share one activation."""
    return max(read_scale(g.weights[f"{module}.input_scale"]) for module in modules)


def _fp8_activation(g: GraphBuilder, x: str, scale: float, *, is_quantized: bool) -> str:
    """Static FP8 E4M3 with the FLOAT scale of the checkpoint; modelopt 0.47 exports it in the dtype of x."""
    value = g.constant(scale)
    if not is_quantized:
        x = g.op("QuantizeLinear", x, value, g.zero(TensorProto.FLOAT8E4M3FN))
    return g.op("DequantizeLinear", x, value, output_dtype=COMPUTE)


def _nvfp4_activation(g: GraphBuilder, x: str, scale: float) -> str:
    """Dynamic NVFP4: scales of blocks of 16 are computed at run time, relative to the static global scale."""
    value = g.constant(scale)
    codes, block_scales = g.ops(
        "TRT_FP4DynamicQuantize",
        (x, value),
        num_outputs=2,
        domain=TRT_DOMAIN,
        axis=-1,
        block_size=BLOCK,
        scale_type=TensorProto.FLOAT8E4M3FN,
    )
    scales = g.op("DequantizeLinear", block_scales, value)
    return g.op("Cast", g.op("DequantizeLinear", codes, scales, axis=-1, block_size=BLOCK), to=COMPUTE)


def _nvfp4_weight(g: GraphBuilder, modules: tuple[str, ...]) -> str:
    """Double dequantisation: FP8 block scales by the FP32 global scale, then FP4 codes by those."""
    codes = g.stored([f"{module}.weight" for module in modules], TensorProto.FLOAT4E2M1)
    block_scales = g.stored([f"{module}.weight_scale" for module in modules])
    scales = g.op("DequantizeLinear", block_scales, g.stored([f"{modules[0]}.weight_scale_2"]))
    return g.op("Cast", g.op("DequantizeLinear", codes, scales, axis=-1, block_size=BLOCK), to=COMPUTE)


def _int4_weight(g: GraphBuilder, modules: tuple[str, ...], rows: int) -> str:
    """Dequantises INT4 codes with FLOAT block scales to [in, out] in the compute dtype; `rows` is out.

    Two rows share a byte: the codes are [out / 2, in, 2], a scale applies along their axis 1, and the pairs are
    separated afterwards. TensorRT's builder transposes the constant itself, and multiplies in one kernel that reads
    INT4.
    """
    columns = g.weights[f"{modules[0]}.weight"].shape[1]
    codes = g.stored([f"{module}.weight" for module in modules], TensorProto.INT4)
    scales = g.op("Cast", g.stored([f"{module}.weight_scale" for module in modules]), to=COMPUTE)
    scales = g.op("Transpose", g.reshape(scales, [rows // 2, 2, columns // INT4_BLOCK]), perm=[0, 2, 1])
    weight = g.op("DequantizeLinear", codes, scales, axis=1, block_size=INT4_BLOCK)
    weight = g.reshape(g.op("Transpose", weight, perm=[0, 2, 1]), [rows, columns])
    return g.op("Transpose", weight, perm=[1, 0])
