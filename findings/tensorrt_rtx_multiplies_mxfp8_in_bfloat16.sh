#!/usr/bin/env bash
# TensorRT-RTX 1.7.1.116: a GEMM of MXFP8 weights and activations is built, and multiplies in BF16.
#
# Parser and builder take TRT_MXFP8DynamicQuantize and TRT_MXFP8DequantizeLinear, for 12.0 whose tensor cores multiply
# MXFP8. The plan quantises the activations, expands them and the whole weight to BF16 in two more kernels, in each
# pass, and multiplies those: FP8's error, more memory traffic than BF16, no warning. The same graph in plain FP8, with
# one scale a tensor, has an FP8 GEMM.
#
# Expected: a GEMM that reads FP8 on both sides, as for NVFP4 and plain FP8; or a refusal.
# Runs NVIDIA's parser and builder on a CPU, for compute capability 12.0; nothing is executed.
set -euo pipefail

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet --disable-pip-version-check \
  ml_dtypes==0.6.0 onnx==1.23.2 tensorrt_rtx_cu13_bindings==1.7.1.116 tensorrt_rtx_cu13_libs==1.7.1.116

cat > "$directory/mxfp8.py" <<'PYTHON'
import re

import ml_dtypes
import numpy as np
import tensorrt_rtx_bindings as trt
from onnx import TensorProto, helper

M, K, N = 128, 256, 512
BF16, FP8 = TensorProto.BFLOAT16, TensorProto.FLOAT8E4M3FN


class Log(trt.ILogger):
    """Keeps what the builder says."""

    def __init__(self):
        trt.ILogger.__init__(self)
        self.lines = []

    def log(self, severity, message):
        self.lines += message.splitlines()

    def kernels(self):
        """Name of each kernel, the types that it reads and those that it writes, from the builder's list of layers."""
        for line in self.lines:
            if line.startswith("Name: ") and "LayerType: " in line and "shape_call" not in line:
                read, _, written = line.partition("Outputs:")
                name = (
                    "GEMM" if "LayerType: gemm" in line else line.partition("TacticName: __myl_")[2].partition("_0x")[0]
                )
                yield name, re.findall(r"Datatype: (\w+)", read), re.findall(r"Datatype: (\w+)", written)


def build(graph, **imports):
    """The kernels of the plan of `graph` for compute capability 12.0, and the errors."""
    opsets = [helper.make_opsetid("", 23), *(helper.make_opsetid(name, version) for name, version in imports.items())]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    log = Log()
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    assert trt.OnnxParser(network, log).parse(model.SerializeToString())
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM120, 0)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    plan = builder.build_serialized_network(network, config)
    return list(log.kernels()) if plan else None


def constant(name, dtype, array):
    return helper.make_tensor(name, dtype, array.shape, array.tobytes(), raw=True)


WEIGHT = constant("w", FP8, np.ones((N, K), ml_dtypes.float8_e4m3fn))
PLAIN = [
    helper.make_node("QuantizeLinear", ["x", "s"], ["q"], output_dtype=FP8),
    helper.make_node("DequantizeLinear", ["q", "s"], ["d"]),
    helper.make_node("DequantizeLinear", ["w", "s"], ["wd"]),
    helper.make_node("Gemm", ["d", "wd"], ["y"], transB=1),
]
BLOCKS = {"domain": "trt", "axis": -1, "block_size": 32}
MX = [
    helper.make_node("TRT_MXFP8DynamicQuantize", ["x"], ["q", "qs"], output_dtype=FP8, **BLOCKS),
    helper.make_node("TRT_MXFP8DequantizeLinear", ["q", "qs"], ["d"], output_dtype=BF16, **BLOCKS),
    helper.make_node("TRT_MXFP8DequantizeLinear", ["w", "s"], ["wd"], output_dtype=BF16, **BLOCKS),
    helper.make_node("Gemm", ["d", "wd"], ["y"], transB=1),
]
ports = [helper.make_tensor_value_info(name, BF16, [M, size]) for name, size in (("x", K), ("y", N))]
for title, nodes, scale in (
    ("FP8", PLAIN, constant("s", BF16, np.float32(1).astype(ml_dtypes.bfloat16))),
    ("MXFP8", MX, constant("s", TensorProto.UINT8, np.full((N, K // 32), 127, np.uint8))),
):
    print(title)
    for name, read, written in build(helper.make_graph(nodes, "g", ports[:1], ports[1:], [WEIGHT, scale]), trt=1):
        print(f"  {name}: {' '.join(read)} -> {' '.join(written)}")
PYTHON

seen=$("$directory/venv/bin/python" "$directory/mxfp8.py")
echo "$seen"
diff <(echo "$seen") - <<'SEEN'
FP8
  Cast: BFloat16 -> FP8
  GEMM: FP8 FP8 Float Float -> BFloat16
MXFP8
  Dyna: BFloat16 -> FP8 FP8UE8M0
  CastReplCastMulCast: FP8 FP8UE8M0 -> BFloat16
  ReplCastMulCast: FP8 BFloat16 -> BFloat16
  GEMM: BFloat16 BFloat16 Float Float -> BFloat16
SEEN
