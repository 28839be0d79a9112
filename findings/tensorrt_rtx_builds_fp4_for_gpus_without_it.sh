#!/usr/bin/env bash
# TensorRT-RTX 1.7.1.116: without a list of compute capabilities, a graph in FP8 or FP4 becomes a plan "for any GPU".
#
# With a list, the builder refuses number types that one of its members lacks (FP8 below 8.9, FP4 below 12.0). The
# default, no list, builds the same graphs without a word and with the plan of 12.0. What cannot run is found out on the
# GPU that lacks the type. Nor does a list cost anything: a plan for five GPUs is as large as one for one, because
# kernels are compiled where it runs.
#
# Expected: a refusal, a warning, or a fallback to BF16 for the older GPUs.
# Runs NVIDIA's parser and builder on a CPU; nothing is executed.
set -euo pipefail

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet --disable-pip-version-check \
  ml_dtypes==0.6.0 onnx==1.23.2 tensorrt_rtx_cu13_bindings==1.7.1.116 tensorrt_rtx_cu13_libs==1.7.1.116

cat > "$directory/portable.py" <<'PYTHON'
import ml_dtypes
import numpy as np
import tensorrt_rtx_bindings as trt
from onnx import TensorProto, helper

K, N = 256, 512
BF16, FP8, FP4 = TensorProto.BFLOAT16, TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT4E2M1


class Log(trt.ILogger):
    """Keeps warnings and errors."""

    def __init__(self):
        trt.ILogger.__init__(self)
        self.lines = []

    def log(self, severity, message):
        if severity <= trt.Logger.WARNING:
            self.lines.append(message)


def constant(name, dtype, array):
    return helper.make_tensor(name, dtype, array.shape, array.tobytes(), raw=True)


SCALE = constant("s", BF16, np.float32(0.01).astype(ml_dtypes.bfloat16))
NODES = {
    "BF16": [helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)],
    "FP8": [
        helper.make_node("QuantizeLinear", ["x", "s"], ["q"], output_dtype=FP8),
        helper.make_node("DequantizeLinear", ["q", "s"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "s"], ["wd"]),
        helper.make_node("Gemm", ["d", "wd"], ["y"], transB=1),
    ],
    "FP4": [
        helper.make_node(
            "TRT_FP4DynamicQuantize", ["x", "s"], ["q", "qs"], domain="trt", axis=-1, block_size=16, scale_type=FP8
        ),
        helper.make_node("DequantizeLinear", ["qs", "s"], ["qsd"]),
        helper.make_node("DequantizeLinear", ["q", "qsd"], ["d"], axis=-1, block_size=16),
        helper.make_node("DequantizeLinear", ["ws", "s"], ["wsd"]),
        helper.make_node("DequantizeLinear", ["w", "wsd"], ["wd"], axis=-1, block_size=16),
        helper.make_node("Gemm", ["d", "wd"], ["y"], transB=1),
    ],
}
WEIGHTS = {
    "BF16": [constant("w", BF16, np.ones((N, K), ml_dtypes.bfloat16))],
    "FP8": [constant("w", FP8, np.ones((N, K), ml_dtypes.float8_e4m3fn)), SCALE],
    "FP4": [
        helper.make_tensor("w", FP4, (N, K), np.full((N, K // 2), 0x22, np.uint8).tobytes(), raw=True),
        constant("ws", FP8, np.ones((N, K // 16), ml_dtypes.float8_e4m3fn)),
        SCALE,
    ],
}


def build(kind, capabilities):
    """Size of the plan and number of warnings, or the builder's reason."""
    ports = [helper.make_tensor_value_info(name, BF16, [16, size]) for name, size in (("x", K), ("y", N))]
    graph = helper.make_graph(NODES[kind], "g", ports[:1], ports[1:], WEIGHTS[kind])
    imports = [helper.make_opsetid("", 23), helper.make_opsetid("trt", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=11)
    log = Log()
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    assert trt.OnnxParser(network, log).parse(model.SerializeToString())
    config = builder.create_builder_config()
    config.num_compute_capabilities = len(capabilities)
    for index, name in enumerate(capabilities):
        config.set_compute_capability(getattr(trt.ComputeCapability, name), index)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        return (
            "refused: "
            + next(line for line in log.lines if "HW-specific" in line).partition("contains ")[2].partition(".")[0]
        )
    return f"a plan of {len(bytes(plan)) / 1e6:.2f} MB, {len(log.lines)} warnings"


for kind in NODES:
    for capabilities in ([], ["SM120"], ["SM89", "SM120"], ["SM80", "SM86", "SM89", "SM120", "SM121"]):
        print(f"{kind}, {' '.join(capabilities) or 'no list'}: {build(kind, capabilities)}")
PYTHON

seen=$("$directory/venv/bin/python" "$directory/portable.py")
echo "$seen"
diff <(echo "$seen") - <<'SEEN'
BF16, no list: a plan of 0.27 MB, 0 warnings
BF16, SM120: a plan of 0.27 MB, 0 warnings
BF16, SM89 SM120: a plan of 0.27 MB, 0 warnings
BF16, SM80 SM86 SM89 SM120 SM121: a plan of 0.27 MB, 0 warnings
FP8, no list: a plan of 0.27 MB, 0 warnings
FP8, SM120: a plan of 0.27 MB, 0 warnings
FP8, SM89 SM120: a plan of 0.27 MB, 0 warnings
FP8, SM80 SM86 SM89 SM120 SM121: refused: HW-specific datatypes: fp8_e4m3
FP4, no list: a plan of 0.35 MB, 0 warnings
FP4, SM120: a plan of 0.35 MB, 0 warnings
FP4, SM89 SM120: refused: HW-specific datatypes: fp4_e2m1
FP4, SM80 SM86 SM89 SM120 SM121: refused: HW-specific datatypes: fp4_e2m1, fp8_e4m3
SEEN
