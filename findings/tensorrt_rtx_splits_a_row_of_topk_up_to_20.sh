#!/usr/bin/env bash
# TensorRT-RTX 1.7.1.116: TopK splits the rows of a vocabulary over many blocks up to K = 20, and not from 21 on.
#
# Up to K = 20 the kernel writes partial results of 47 parts of a row of 32,000 logits and merges them. From 21 on it
# has none: each row, however long, is searched where it stands, and a decode step has only a few rows for a whole GPU.
# K beyond 3,840 passes the parser and is refused by the builder. Top-20 and top-21 sampling, or a selector of 16 or of
# 32 candidates, are not the neighbours that they seem; which of the kernels is faster was not measured.
#
# Expected: one way for all K, or a change at a power of two.
# Runs NVIDIA's parser and builder on a CPU, for compute capability 12.0; nothing is executed.
set -euo pipefail

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet --disable-pip-version-check \
  onnx==1.23.2 tensorrt_rtx_cu13_bindings==1.7.1.116 tensorrt_rtx_cu13_libs==1.7.1.116

cat > "$directory/topk.py" <<'PYTHON'
import re

import tensorrt_rtx_bindings as trt
from onnx import TensorProto, helper

V, ROWS = 32000, 16


class Log(trt.ILogger):
    """Keeps what the builder says."""

    def __init__(self):
        trt.ILogger.__init__(self)
        self.lines = []

    def log(self, severity, message):
        self.lines += message.splitlines()

    def kernels(self):
        """Name of each kernel, the types read and the shapes written, from the builder's list of layers."""
        for line in self.lines:
            if line.startswith("Name: ") and "LayerType: " in line and "shape_call" not in line:
                read, _, written = line.partition("Outputs:")
                name = (
                    "GEMM" if "LayerType: gemm" in line else line.partition("TacticName: __myl_")[2].partition("_0x")[0]
                )
                yield name, re.findall(r"Datatype: (\w+)", read), re.findall(r"Dimensions: (\S+),", written)


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


for k in (1, 16, 20, 21, 32, 64, 3840, 3841):
    x = helper.make_tensor_value_info("x", TensorProto.BFLOAT16, [ROWS, V])
    outputs = [
        helper.make_tensor_value_info("v", TensorProto.BFLOAT16, [ROWS, k]),
        helper.make_tensor_value_info("i", TensorProto.INT64, [ROWS, k]),
    ]
    size = helper.make_tensor("k", TensorProto.INT64, [1], [k])
    kernels = build(helper.make_graph([helper.make_node("TopK", ["x", "k"], ["v", "i"])], "g", [x], outputs, [size]))
    print(
        f"K = {k}:",
        "; ".join(f"{name} writes {' '.join(written)}" for name, _, written in kernels) if kernels else "no plan",
    )
PYTHON

seen=$("$directory/venv/bin/python" "$directory/topk.py")
echo "$seen"
diff <(echo "$seen") - <<'SEEN'
K = 1: Move writes [16]; Topk writes [16,47] [16,1] [16,47] [16,1]
K = 16: Move writes [16]; Topk writes [16,752] [16,16] [16,752] [16,16]
K = 20: Move writes [16]; Topk writes [16,940] [16,20] [16,940] [16,20]
K = 21: Topk writes [16,21] [16,21]
K = 32: Topk writes [16,32] [16,32]
K = 64: Topk writes [16,64] [16,64]
K = 3840: Topk writes [16,3840] [16,3840]
K = 3841: no plan
SEEN
