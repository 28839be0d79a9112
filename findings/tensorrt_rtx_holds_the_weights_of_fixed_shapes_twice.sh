#!/usr/bin/env bash
# TensorRT-RTX 1.7.1.116: a second profile of one fixed shape stores all weights once more; a third does not.
#
# Profiles of ranges cost some 10 kB each and share their weights. So do three or more profiles whose min, opt and max
# are equal, but from one to two of them the plan doubles: 4.2 to 8.4 MB for a MatMul of 4.2 MB. Fixed shapes, one
# for each CUDA graph that is to be captured, are what one gives small batches of a drafter: the plan of one with 0.75
# billion parameters in BF16 would grow by 1.5 GB. One profile from the smallest to the largest has the weights once.
#
# Expected: one copy of the weights in a plan, or one for each profile.
# Runs NVIDIA's parser and builder on a CPU, for compute capability 12.0; nothing is executed.
set -euo pipefail

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet --disable-pip-version-check \
  ml_dtypes==0.6.0 onnx==1.23.2 tensorrt_rtx_cu13_bindings==1.7.1.116 tensorrt_rtx_cu13_libs==1.7.1.116

cat > "$directory/profiles.py" <<'PYTHON'
import ml_dtypes
import numpy as np
import tensorrt_rtx_bindings as trt
from onnx import TensorProto, helper

K, N = 1024, 2048
weights = np.random.default_rng(0).standard_normal((K, N)).astype(ml_dtypes.bfloat16)
initializer = helper.make_tensor("w", TensorProto.BFLOAT16, (K, N), weights.tobytes(), raw=True)
ports = [helper.make_tensor_value_info(name, TensorProto.BFLOAT16, ["M", size]) for name, size in (("x", K), ("y", N))]
graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", ports[:1], ports[1:], [initializer])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()
logger = trt.Logger(trt.Logger.INTERNAL_ERROR)


def plan(rows: list[tuple[int, int]]) -> int:
    """Bytes of the plan with a profile for each range of rows."""
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    assert trt.OnnxParser(network, logger).parse(model)
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM120, 0)
    for smallest, largest in rows:
        profile = builder.create_optimization_profile()
        profile.set_shape("x", (smallest, K), (largest, K), (largest, K))
        assert config.add_optimization_profile(profile) >= 0
    return len(bytes(builder.build_serialized_network(network, config)))


print("weights: 4.2 MB")
for rows in (
    [(1, 1)],
    [(1, 1), (8, 8)],
    [(1, 1), (8, 8), (16, 16)],
    [(1, 1), (2, 2), (4, 4), (8, 8)],
    [(1, 8)],
    [(1, 8), (1, 16)],
    [(1, 2), (1, 4), (1, 8), (1, 16)],
):
    print(
        ", ".join(f"{low}" if low == high else f"{low} to {high}" for low, high in rows),
        f"rows: {plan(rows) / 1e6:.1f} MB",
    )
PYTHON

seen=$("$directory/venv/bin/python" "$directory/profiles.py")
echo "$seen"
diff <(echo "$seen") - <<'SEEN'
weights: 4.2 MB
1 rows: 4.2 MB
1, 8 rows: 8.4 MB
1, 8, 16 rows: 8.4 MB
1, 2, 4, 8 rows: 8.4 MB
1 to 8 rows: 4.2 MB
1 to 8, 1 to 16 rows: 4.2 MB
1 to 2, 1 to 4, 1 to 8, 1 to 16 rows: 4.2 MB
SEEN
