#!/usr/bin/env bash
# TensorRT-RTX 1.7.1.116: FP8 weights with a scale for each output channel cost one kernel and one rounding more.
#
# With one scale a tensor, both scales go into the GEMM's epilogue: quantise, GEMM, two kernels. With one a channel,
# as compressed-tensors' FP8_DYNAMIC and ModelOpt's per-channel presets store it, the GEMM writes BF16 unscaled and a
# third kernel reads it back, multiplies and rounds again. At the few rows of a draft pass a kernel is what costs.
#
# Expected: the vector of scales in the epilogue, too.
# Runs NVIDIA's parser and builder on a CPU, for compute capability 12.0; nothing is executed.
set -euo pipefail

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet --disable-pip-version-check \
  ml_dtypes==0.6.0 onnx==1.23.2 tensorrt_rtx_cu13_bindings==1.7.1.116 tensorrt_rtx_cu13_libs==1.7.1.116

cat > "$directory/channels.py" <<'PYTHON'
import re

import ml_dtypes
import numpy as np
import tensorrt_rtx_bindings as trt
from onnx import TensorProto, helper

M, K, N = 16, 256, 512
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


ports = [helper.make_tensor_value_info(name, BF16, [M, size]) for name, size in (("x", K), ("y", N))]
for title, sizes in (("one scale", ()), ("a scale for each output channel", (N,))):
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs"], ["q"], output_dtype=FP8),
        helper.make_node("DequantizeLinear", ["q", "xs"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "ws"], ["wd"], axis=0),
        helper.make_node("Gemm", ["d", "wd"], ["y"], transB=1),
    ]
    weights = [
        constant("xs", BF16, np.float32(0.01).astype(ml_dtypes.bfloat16)),
        constant("ws", BF16, np.full(sizes, 0.02, ml_dtypes.bfloat16)),
        constant("w", FP8, np.ones((N, K), ml_dtypes.float8_e4m3fn)),
    ]
    print(title)
    for name, read, written in build(helper.make_graph(nodes, "g", ports[:1], ports[1:], weights)):
        print(f"  {name}: {' '.join(read)} -> {' '.join(written)}")
PYTHON

seen=$("$directory/venv/bin/python" "$directory/channels.py")
echo "$seen"
diff <(echo "$seen") - <<'SEEN'
one scale
  MulCast: BFloat16 BFloat16 -> FP8
  GEMM: FP8 FP8 Float Float -> BFloat16
a scale for each output channel
  MulCast: BFloat16 BFloat16 -> FP8
  GEMM: FP8 FP8 Float Float -> BFloat16
  Mul: BFloat16 BFloat16 -> BFloat16
SEEN
