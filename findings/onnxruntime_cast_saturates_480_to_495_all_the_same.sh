#!/usr/bin/env bash
# onnxruntime 1.32.0: Cast to FLOAT8E4M3FN with saturate=0 saturates values from 480 up to 496 all the same.
#
# ONNX defines that without saturation a value beyond the largest finite one (448) becomes NaN; what rounds to
# 448 (up to 464) stays. Values above 464 become NaN, values of at least 496 become NaN, but those in between,
# from 480 on, come back as 448. A check for overflow that looks for NaN misses them.
#
# Expected: NaN for everything above 464.
set -euo pipefail

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2

cat > "$directory/cast.py" <<'PYTHON'
import numpy as np
import onnxruntime
from onnx import TensorProto, helper

values = [448.0, 464.0, 465.0, 479.0, 480.0, 495.0, 496.0, -480.0, 512.0]
nodes = [
    helper.make_node("Cast", ["x"], ["q"], to=TensorProto.FLOAT8E4M3FN, saturate=0),
    helper.make_node("Cast", ["q"], ["y"], to=TensorProto.FLOAT),
]
ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [len(values)]) for name in ("x", "y")]
graph = helper.make_graph(nodes, "cast", ports[:1], ports[1:])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
(result,) = session.run(None, {"x": np.array(values, np.float32)})
for value, cast in zip(values, result, strict=True):
    print(f"{value:g} -> {cast:g}")
PYTHON

seen=$("$directory/venv/bin/python" "$directory/cast.py")
echo "$seen"
diff <(echo "$seen") - <<'SEEN'
448 -> 448
464 -> 448
465 -> nan
479 -> nan
480 -> 448
495 -> 448
496 -> nan
-480 -> -448
512 -> nan
SEEN
