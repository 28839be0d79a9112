#!/usr/bin/env bash
# mlx 0.32.4: quantize(mode="nvfp4") stores no global scale, so small weights become zero and large ones saturate.
#
# NVFP4 as NVIDIA's tools write it has an FP8 (E4M3) scale for each 16 weights and one float32 scale for the
# tensor, which moves the block scales into E4M3's range. mlx stores amax / 6 in E4M3 directly unless a global
# scale is passed. E4M3 ends at 2^-9 below and at 448 above: blocks whose largest weight is below about 0.006 come
# back as zeros, those above 2,688 are clipped. There is no warning.
#
# Expected: a relative error that does not depend on the magnitude of the tensor.
set -euo pipefail

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet --disable-pip-version-check mlx==0.32.4 mlx-cpu==0.32.4

cat > "$directory/small.py" <<'PYTHON'
import mlx.core as mx

mx.set_default_device(mx.cpu)
base = mx.random.normal((64, 1024), key=mx.random.key(0))
for std in (1.0, 0.02, 0.005, 0.001):
    weights = base * std
    packed, scales = mx.quantize(weights, mode="nvfp4")
    restored = mx.dequantize(packed, scales, mode="nvfp4", dtype=mx.float32)
    error = (mx.sqrt(mx.mean((restored - weights) ** 2)) / mx.sqrt(mx.mean(weights**2))).item()
    zeros = mx.mean(restored == 0).item()
    print(f"standard deviation {std}: relative error {100 * error:.0f} %, zeros {100 * zeros:.0f} %")
PYTHON

seen=$("$directory/venv/bin/python" "$directory/small.py")
echo "$seen"
diff <(echo "$seen") - <<'SEEN'
standard deviation 1.0: relative error 10 %, zeros 7 %
standard deviation 0.02: relative error 10 %, zeros 7 %
standard deviation 0.005: relative error 14 %, zeros 9 %
standard deviation 0.001: relative error 100 %, zeros 100 %
SEEN
