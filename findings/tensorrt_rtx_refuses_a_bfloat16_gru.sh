#!/usr/bin/env bash
# TensorRT-RTX 1.7.1.116: the parser refuses ONNX's GRU in BF16; it takes LSTM and RNN in BF16, and GRU in FP16.
#
# The parser expands a GRU into elementwise layers and computes 1 - z with a constant of its own. In BF16 that constant
# is FLOAT, so the expansion breaks the rule of strongly typed networks that both inputs have one type. A drafter with
# a GRU (Domino's) must therefore write out MatMul, Sigmoid and Tanh itself.
#
# Expected: what holds for LSTM, RNN and FP16 also holds for a BF16 GRU.
# Runs NVIDIA's parser on a CPU; nothing is built or executed.
set -euo pipefail

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet --disable-pip-version-check \
  onnx==1.23.2 tensorrt_rtx_cu13_bindings==1.7.1.116 tensorrt_rtx_cu13_libs==1.7.1.116

cat > "$directory/gru.py" <<'PYTHON'
import tensorrt_rtx_bindings as trt
from onnx import TensorProto, helper

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
INPUT, HIDDEN, STEPS = 8, 8, 4
logger = trt.Logger(trt.Logger.INTERNAL_ERROR)


def parsed(kind, dtype):
    ports = [
        helper.make_tensor_value_info("x", dtype, [STEPS, 1, INPUT]),
        helper.make_tensor_value_info("w", dtype, [1, GATES[kind] * HIDDEN, INPUT]),
        helper.make_tensor_value_info("r", dtype, [1, GATES[kind] * HIDDEN, HIDDEN]),
    ]
    node = helper.make_node(kind, ["x", "w", "r"], ["y"], hidden_size=HIDDEN)
    output = helper.make_tensor_value_info("y", dtype, [STEPS, 1, 1, HIDDEN])
    model = helper.make_model(
        helper.make_graph([node], "g", ports, [output]), opset_imports=[helper.make_opsetid("", 22)], ir_version=10
    )
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if parser.parse(model.SerializeToString()):
        return "accepted"
    text = parser.get_error(0).desc()
    return "refused: SUB of Float and BFloat16" if "SUB" in text and "BFloat16" in text else f"refused: {text}"


for kind in GATES:
    for name, dtype in (("FP16", TensorProto.FLOAT16), ("BF16", TensorProto.BFLOAT16)):
        print(f"{kind} {name}: {parsed(kind, dtype)}")
PYTHON

seen=$("$directory/venv/bin/python" "$directory/gru.py" 2>/dev/null)
echo "$seen"
diff <(echo "$seen") - <<'SEEN'
RNN FP16: accepted
RNN BF16: accepted
GRU FP16: accepted
GRU BF16: refused: SUB of Float and BFloat16
LSTM FP16: accepted
LSTM BF16: accepted
SEEN
