# SPDX-License-Identifier: Apache-2.0
"""Times products with weights in their storage format, next to ONNX Runtime's FLOAT kernel, on this machine.

One linear layer at a time, by one thread: `_C`'s PackedLinear on BF16, FP8 and NVFP4, and a Gemm on the same numbers in
FLOAT, which ONNX Runtime packs when the session is made. They take turns; each time is the median, in microseconds, and
beside it the ratio to the Gemm. Between two calls other memory is read, as a target does between two drafts, so weights
come from where they would then: --cold MiB of it. "rule" is what `packed_linear.MIN_PACKED` chooses.
Prints tables, asserts nothing; two minutes, best when nothing else runs.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import onnxruntime
from onnx import NodeProto, TensorProto, helper

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from dflash_trt import _C  # noqa: E402
from dflash_trt.cli.output import print_table  # noqa: E402
from dflash_trt.engine.graph.onnx_builder import OPSET, PLUGIN_DOMAIN  # noqa: E402
from dflash_trt.files.processor import cpu_model  # noqa: E402
from dflash_trt.runtime.drafter.onnxruntime.packed_linear import MIN_PACKED, PACKED_LINEAR  # noqa: E402

SHAPES = ((256, 128), (384, 128), (512, 256), (1536, 256), (512, 512), (3072, 512), (1024, 1024), (6144, 1024),
          (5120, 2880), (2880, 7680))  # fmt: skip
FORMATS = {"BFLOAT16": 2.0, "FP8": 1.0, "NVFP4": 0.5}
"""Bytes of a code."""


@click.command()
@click.option(
    "--rows", "row_counts", type=int, multiple=True, default=(8, 64, 128), show_default=True, help="Rows of x."
)
@click.option("--seconds", default=4.0, show_default=True, help="For each shape and number of rows.")
@click.option("--cold", default=16, show_default=True, help="MiB that are read between two calls.")
def main(row_counts: tuple[int, ...], seconds: float, cold: int) -> None:
    """Print microseconds a layer takes, and ratios to FLOAT."""
    rng = np.random.default_rng(0)
    other = np.ones(cold * 2**18, np.float32)
    for num_rows in row_counts:
        rows = []
        for n, k in SHAPES:
            x = rng.standard_normal((num_rows, k)).astype(np.float32)
            sessions = [gemm(rng, n, k), *(packed(rng, kind, n, k) for kind in FORMATS)]
            base, *times = measured(sessions, x, other, seconds)
            cells = [f"{time:.1f} ({time / base:.2f})" for time in times]
            rows.append((f"{n} x {k}", f"{base:.1f}", *cells, "packed" if k >= MIN_PACKED else "FLOAT"))
        print_table(f"x of {num_rows} rows; {cpu_model()}, one thread", ("weight", "Gemm", *FORMATS, "rule"), rows)


def gemm(rng: np.random.Generator, n: int, k: int) -> onnxruntime.InferenceSession:
    """A session on x times a FLOAT weight."""
    weight = rng.standard_normal((n, k)).astype(np.float32)
    node = helper.make_node("Gemm", ["x", "weight"], ["out"], transB=1)
    return session(node, {"weight": (TensorProto.FLOAT, weight)})


def packed(rng: np.random.Generator, kind: str, n: int, k: int) -> onnxruntime.InferenceSession:
    """A session on x times a packed weight."""
    codes = rng.integers(0, 64, (n, int(k * FORMATS[kind])), dtype=np.uint8)  # small numbers of each format
    inputs = {"codes": (TensorProto.UINT8, codes)}
    if kind == "NVFP4":
        inputs["block_scales"] = TensorProto.UINT8, np.full((n, k // 16), 56, np.uint8)
    node = helper.make_node(PACKED_LINEAR, ["x", *inputs], ["out"], domain=PLUGIN_DOMAIN, format=kind, scale=1.0)
    return session(node, inputs)


def session(node: NodeProto, weights: Mapping[str, tuple[int, npt.NDArray[Any]]]) -> onnxruntime.InferenceSession:
    """One node, with stored weights."""
    initializers = [
        helper.make_tensor(name, kind, array.shape, array.tobytes(), raw=True)
        for name, (kind, array) in weights.items()
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "out")]
    graph = helper.make_graph([node], "linear", ends[:1], ends[1:], initializers)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(PLUGIN_DOMAIN, 1)]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.register_custom_ops_library(_C.__file__)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def measured(
    sessions: list[onnxruntime.InferenceSession], x: np.ndarray, other: np.ndarray, seconds: float
) -> list[float]:
    """Median time of a call of each session in turn, in microseconds."""
    bindings = []
    for one in sessions:
        binding = one.io_binding()
        binding.bind_cpu_input("x", x)
        binding.bind_output("out", "cpu")
        bindings.append(binding)
    times: list[list[float]] = [[] for _ in sessions]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for one, binding, taken in zip(sessions, bindings, times, strict=True):
            other.sum()
            begin = time.perf_counter()
            one.run_with_iobinding(binding)
            taken.append(1e6 * (time.perf_counter() - begin))
    return [statistics.median(taken) for taken in times]


if __name__ == "__main__":
    main()
