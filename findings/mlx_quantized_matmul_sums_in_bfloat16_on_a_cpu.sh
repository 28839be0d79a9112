#!/usr/bin/env bash
# mlx 0.32.4 on a CPU: quantized_matmul of BF16 activations accumulates in BF16.
#
# A row of 4,096 ones times a column of 4,096 ones, quantised exactly (8 bits, affine), gives 256: from there on
# BF16 cannot add 1 any more. The dense matmul of the same arrays gives 4096. On random data the error grows with
# the inner dimension and exceeds that of the quantisation many times over, so acceptance or perplexity that is
# measured with it on a CPU says little about the quantised weights.
#
# Expected: 4096, as with float32 accumulation. (Metal was not run.)
set -euo pipefail

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet --disable-pip-version-check mlx==0.32.4 mlx-cpu==0.32.4

cat > "$directory/ones.py" <<'PYTHON'
import mlx.core as mx

mx.set_default_device(mx.cpu)
for dtype in (mx.float32, mx.bfloat16):
    for size in (128, 256, 512, 4096):
        x, w = mx.ones((1, size), dtype), mx.ones((1, size), dtype)
        packed, scales, biases = mx.quantize(w, group_size=64, bits=8)
        restored = mx.dequantize(packed, scales, biases, group_size=64, bits=8)
        assert mx.all(restored == 1).item(), "the weights are exact"
        quantised = mx.quantized_matmul(x, packed, scales, biases, transpose=True, group_size=64, bits=8)
        print(f"{dtype}, {size} ones: dense {(x @ w.T).item():g}, quantised {quantised.item():g}")
PYTHON

seen=$("$directory/venv/bin/python" "$directory/ones.py")
echo "$seen"
diff <(echo "$seen") - <<'SEEN'
mlx.core.float32, 128 ones: dense 128, quantised 128
mlx.core.float32, 256 ones: dense 256, quantised 256
mlx.core.float32, 512 ones: dense 512, quantised 512
mlx.core.float32, 4096 ones: dense 4096, quantised 4096
mlx.core.bfloat16, 128 ones: dense 128, quantised 128
mlx.core.bfloat16, 256 ones: dense 256, quantised 256
mlx.core.bfloat16, 512 ones: dense 512, quantised 256
mlx.core.bfloat16, 4096 ones: dense 4096, quantised 256
SEEN
