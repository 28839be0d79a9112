#!/usr/bin/env bash
# onnx 1.23.2: inline_local_functions drops the defaults of a function's attributes, which changes the result.
#
# A model-local function may give its attributes defaults, which a call then leaves out. The checker accepts such a
# model and onnxruntime 1.32.0 runs it. Inlined by onnx itself, the node loses the attribute without a word: it takes
# the operator's own default instead, here Softmax over the other axis. Where the operator has none, the model becomes
# invalid. Exporters, optimisers and TensorRT's users inline before they compile.
#
# Expected: the function's default in the inlined node, and the same result.
set -euo pipefail

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2

cat > "$directory/defaults.py" <<'PYTHON'
import numpy as np
import onnx
import onnxruntime
from onnx import inliner, parser

onnxruntime.disable_telemetry_events()
MODEL = """<ir_version: 10, opset_import: ["" : 21, "own" : 1]>
g (float[2, 3] x) => (float[A, B] y) { y = own.Normalised CALL (x) }
<domain: "own", opset_import: ["" : 21]>
Normalised <axis: int = 0> (x) => (y) { y = Softmax <axis: int = @axis> (x) }"""
X = np.array([[0, 0, 0], [0, 0, 0]], np.float32)


def first(model):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return f"{session.run(None, {'x': X})[0][0, 0]:.2f}"


for title, call in (("attribute given", "<axis: int = 0>"), ("default of the function", "")):
    model = parser.parse_model(MODEL.replace("CALL", call))
    onnx.checker.check_model(model, full_check=True)
    inlined = inliner.inline_local_functions(model)
    print(f"{title}: as it is {first(model)}, inlined by onnx {first(inlined)}")
PYTHON

seen=$("$directory/venv/bin/python" "$directory/defaults.py")
echo "$seen"
diff <(echo "$seen") - <<'SEEN'
attribute given: as it is 0.50, inlined by onnx 0.50
default of the function: as it is 0.50, inlined by onnx 0.33
SEEN
