#!/usr/bin/env bash
# TensorRT-RTX 1.7.1.116: the parser accepts Attention's nonpad_kv_seqlen (opset 24) and drops it.
#
# The input gives, for each sequence of a batch, how many rows of K and V are valid; the rest is padding that
# must not be attended to. Parser and builder succeed, and the plan has the same layers as without the input: no
# layer reads it. past_key, by comparison, is refused by name.
#
# Expected: an attention kernel that reads the lengths, or a refusal by the parser.
# Runs NVIDIA's parser and builder on a CPU, for compute capability 12.0; nothing is executed.
set -euo pipefail

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet --disable-pip-version-check \
  onnx==1.23.2 tensorrt_rtx_cu13_bindings==1.7.1.116 tensorrt_rtx_cu13_libs==1.7.1.116

cat > "$directory/attention.py" <<'PYTHON'
import tensorrt_rtx_bindings as trt
from onnx import TensorProto, helper

B, N, S, C, D = 2, 4, 8, 64, 64
BF16 = TensorProto.BFLOAT16
LOGGER = trt.Logger(trt.Logger.INTERNAL_ERROR)


def model(optional: str, sizes: list[int], dtype: int) -> bytes:
    """One Attention node with q, k, v and the optional input of this name."""
    places = {"past_key": 4, "nonpad_kv_seqlen": 6}
    names = ["q", "k", "v", "", "", "", ""][: places[optional]] + [optional]
    inputs = [helper.make_tensor_value_info("q", BF16, [B, N, S, D])]
    inputs += [helper.make_tensor_value_info(name, BF16, [B, N, C, D]) for name in ("k", "v")]
    inputs += [helper.make_tensor_value_info(optional, dtype, sizes)]
    if optional == "past_key":
        names.append("past_value")
        inputs.append(helper.make_tensor_value_info("past_value", dtype, sizes))
    outputs = [helper.make_tensor_value_info("y", BF16, [B, N, S, D])]
    graph = helper.make_graph([helper.make_node("Attention", names, ["y"])], "g", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11).SerializeToString()


def network_of(model: bytes) -> tuple[trt.Builder, trt.INetworkDefinition | None, str]:
    """The parsed network, or None and the parser's error."""
    builder = trt.Builder(LOGGER)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, LOGGER)
    if parser.parse(model):
        return builder, network, ""
    return builder, None, parser.get_error(0).desc()


builder, network, error = network_of(model("past_key", [B, N, 16, D], BF16))
print(f"past_key: {'accepted' if network else 'refused by the parser'}")

builder, network, error = network_of(model("nonpad_kv_seqlen", [B], TensorProto.INT64))
assert network is not None, error
layers = [network.get_layer(i) for i in range(network.num_layers)]
read = {tensor.name for layer in layers for i in range(layer.num_inputs) if (tensor := layer.get_input(i))}
config = builder.create_builder_config()
config.num_compute_capabilities = 1
config.set_compute_capability(trt.ComputeCapability.SM120, 0)
plan = builder.build_serialized_network(network, config)
inputs = [network.get_input(i).name for i in range(network.num_inputs)]
print(f"nonpad_kv_seqlen: accepted, inputs of the network {inputs}, of which its layers read {sorted(read & {*inputs})}")
print(f"plan: {'built' if plan else 'none'}")
PYTHON

seen=$("$directory/venv/bin/python" "$directory/attention.py" 2> "$directory/log")
echo "$seen"
diff <(echo "$seen") - <<'SEEN'
past_key: refused by the parser
nonpad_kv_seqlen: accepted, inputs of the network ['q', 'k', 'v', 'nonpad_kv_seqlen'], of which its layers read ['k', 'q', 'v']
plan: built
SEEN
