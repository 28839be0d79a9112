#!/usr/bin/env bash
# TensorRT-RTX 1.7.1.116: ONNX's LogSoftmax becomes SOFTMAX followed by LOG, in the type of its input.
#
# log(softmax(x)) is -inf wherever the probability underflows, and has no more precision than the probability. In
# FP16 that happens as soon as a logit lies about 17 below the largest one, which is most of a vocabulary of a
# language model. LogSoftmax is usually asked for precisely to avoid this.
#
# Expected: layers that compute x - max - log(sum(exp(x - max))), or at least a float32 softmax.
# Runs NVIDIA's parser on a CPU; nothing is executed. The numbers show what the two layers give in FP16.
set -euo pipefail

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet --disable-pip-version-check \
  numpy==2.4.4 onnx==1.23.2 tensorrt_rtx_cu13_bindings==1.7.1.116 tensorrt_rtx_cu13_libs==1.7.1.116

cat > "$directory/log_softmax.py" <<'PYTHON'
import numpy as np
import tensorrt_rtx_bindings as trt
from onnx import TensorProto, helper

ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, [1, 32000]) for name in ("x", "y")]
graph = helper.make_graph([helper.make_node("LogSoftmax", ["x"], ["y"], axis=-1)], "g", ports[:1], ports[1:])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
builder = trt.Builder(logger)
network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
assert trt.OnnxParser(network, logger).parse(model.SerializeToString())
for layer in map(network.get_layer, range(network.num_layers)):
    if layer.type in (trt.LayerType.SOFTMAX, trt.LayerType.UNARY):
        print(f"{layer.type.name} {layer.get_input(0).dtype.name} -> {layer.get_output(0).dtype.name}")

x = np.array([0, -10, -16, -17.5, -20], np.float16)
p = np.exp(x - x.max())
with np.errstate(divide="ignore"):
    print("log of the softmax, FP16:", np.log((p / p.sum()).astype(np.float16)).round(1).tolist())
print("log-sum-exp, FP16:      ", (x - x.max() - np.log(p.sum())).round(1).tolist())
PYTHON

seen=$("$directory/venv/bin/python" "$directory/log_softmax.py")
echo "$seen"
diff <(echo "$seen") - <<'SEEN'
SOFTMAX HALF -> HALF
UNARY HALF -> HALF
log of the softmax, FP16: [0.0, -10.0, -16.0, -inf, -inf]
log-sum-exp, FP16:       [0.0, -10.0, -16.0, -17.5, -20.0]
SEEN
