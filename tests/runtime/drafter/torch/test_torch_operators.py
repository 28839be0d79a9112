# SPDX-License-Identifier: Apache-2.0
"""Each operator that the graphs contain, on the values it gets there, against ONNX's own reference in float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor

from dflash_trt.engine.graph.draft_graph import ATTENTION
from dflash_trt.engine.graph.onnx_builder import OPSET
from dflash_trt.runtime.drafter.torch import operators
from dflash_trt.runtime.drafter.torch.graph_program import calls_of
from dflash_trt.runtime.drafter.torch.onnx_graph import UNPACK, Node, OnnxGraph
from dflash_trt.runtime.drafter.torch.operators import OPERATORS
from dflash_trt.runtime.drafter.torch.stored_weights import StoredWeights
from tests.runtime.drafter.torch.drafts import MAKERS, QUICK, Maker, parameters

ROUNDED = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-22, torch.float8_e4m3fn: 0.0}
"""Half a unit in the last place, relative; FLOAT's functions may be off by two. FP8 codes are exact."""
CODES = ("Cast", "QuantizeLinear", "TRT_FP4DynamicQuantize")
"""Operators whose rounding is the point: equal bits."""


def exact(tensor: Tensor) -> np.ndarray:
    """Floats as float64, integers as they are."""
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy()


def reference(node: Node, inputs: list[Tensor]) -> list[np.ndarray]:
    """Definition of the node in ONNX."""
    if node.op_type == "QuantizeLinear":
        quotient = exact(inputs[0]) / exact(inputs[1])
        return [quotient.clip(-448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)]
    if node.op_type == "TRT_FP4DynamicQuantize":
        return list(fp4(*map(exact, inputs)))
    if node.op_type == "Cast":
        to = helper.tensor_dtype_to_np_dtype(node.attributes["to"])
        return [exact(inputs[0]).astype(to).astype(np.float64 if np.dtype(to).kind not in "iu" else to)]
    feeds = [exact(tensor) for tensor in inputs]
    names = [f"x{index}" for index in range(len(feeds))]
    made = helper.make_node(node.op_type, names, list(node.outputs), **node.attributes)
    ports = [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), None)
             for name, x in zip(names, feeds, strict=True)]  # fmt: skip
    outputs = [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in node.outputs]
    graph = helper.make_graph([made], "one", ports, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    return list(ReferenceEvaluator(model).run(None, dict(zip(names, feeds, strict=True))))


E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)


def fp4(x: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Dynamic FP4 by search among the sixteen values; of two as near, the one with an even code."""
    blocks = x.astype(np.float32).reshape(-1, 16)
    ratio = np.abs(blocks).max(-1) / (np.float32(6) * scale.astype(np.float32))
    scales = ratio.clip(max=448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    unit = (scales * scale.astype(np.float32))[:, None]
    wanted = np.divide(blocks, unit, out=np.zeros_like(blocks), where=unit != 0).clip(-6, 6)
    distance = np.abs(wanted[..., None].astype(np.float64) - E2M1) + np.where(np.arange(16) % 2, 1e-12, 0)
    return E2M1[distance.argmin(-1)].reshape(x.shape), scales.reshape(*x.shape[:-1], -1).astype(np.float64)


def compare(node: Node, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    if node.op_type == "TopK":  # any of equal ones
        values, indices = outputs
        assert torch.equal(inputs[0].gather(-1, indices), values)
        assert all(len(set(row)) == len(row) for row in indices.flatten(0, -2).tolist())
        outputs = [values, torch.from_numpy(reference(node, inputs)[1])]
    for found, expected in zip(outputs, reference(node, inputs), strict=True):
        assert tuple(found.shape) == expected.shape, node
        if not found.is_floating_point():
            np.testing.assert_array_equal(found.numpy(), expected, err_msg=str(node))
            continue
        error = np.abs(exact(found) - expected)
        bound = 0.0 if node.op_type in CODES else ROUNDED[found.dtype] * np.abs(expected) + sums(node, inputs)
        assert (error <= bound + 1e-38).all(), f"{node}: off by {np.max(error)}"


def sums(node: Node, inputs: list[Tensor]) -> Any:
    """Bound on the rounding error of a sum in FLOAT: one unit per summand."""
    if node.op_type == "Gemm":
        x, weight = (np.abs(exact(tensor)) for tensor in inputs)
        return 2.0**-23 * x.shape[-1] * (x @ weight.T)
    if node.op_type == "MatMul":
        x, y = (np.abs(exact(tensor)) for tensor in inputs)
        return 2.0**-23 * x.shape[-1] * (x @ y)
    if node.op_type in ("Add", "Sub", "Softplus", "ReduceMean"):
        return 2.0**-23 * max(np.abs(exact(tensor)).max(initial=0) for tensor in inputs)
    return 0.0


def walk(manifest_directory: Path, file: str, seen: set[Any]) -> Iterator[tuple[Node, list[Tensor], list[Tensor]]]:
    """Each node of a graph that is unlike those seen: with the values that it gets for random inputs."""
    graph = OnnxGraph(manifest_directory, file, StoredWeights(manifest_directory, torch.device("cpu")))
    values = dict(graph.constants)
    generator = torch.Generator().manual_seed(0)
    for node in graph.nodes:
        for name in node.inputs:
            if name not in values and name not in graph.producers:
                values[name] = given(name, graph, generator)
        inputs = [values[name] for name in node.inputs]
        if node.op_type == ATTENTION:
            dtype = torch.float8_e4m3fn if node.attributes["fp8_output"] else torch.bfloat16
            values[node.outputs[0]] = torch.randn(2 * 6, 4 * 64, generator=generator).to(dtype)
            continue
        (call,) = calls_of(graph, node)
        made = call.function(*inputs[: len(call.inputs)])
        outputs = [made] if isinstance(made, Tensor) else list(made)
        values |= zip(node.outputs, outputs, strict=True)
        key = (node.op_type, str(node.attributes), tuple((t.dtype, t.dim()) for t in inputs))
        if node.op_type != UNPACK and key not in seen:
            seen.add(key)
            yield node, inputs, outputs


def given(name: str, graph: OnnxGraph, generator: torch.Generator) -> Tensor:
    """A random input of either graph."""
    if name == "positions":
        return torch.randint(0, 900, (5,) if "context" in graph.file.name else (2, 6), generator=generator).int()
    model = onnx.load(graph.file, load_external_data=False)
    port = next(port for port in model.graph.input if port.name == name).type.tensor_type
    if name == "candidate_log_probs":
        return torch.randn(2, 5, 96, generator=generator).log_softmax(-1).topk(port.shape.dim[2].dim_value).values
    if port.elem_type != TensorProto.BFLOAT16:
        return torch.zeros(1, dtype=torch.int32)  # where the context lies: read by attention alone
    sizes = [dim.dim_value or {"T": 5, "B": 2}[dim.dim_param] for dim in port.shape.dim]
    return torch.randn(sizes, generator=generator).bfloat16()


def check(make: Maker, directory: Path) -> set[str]:
    """Compares what is new in an engine's graphs; the operators there."""
    graphs = make(directory).graphs.values()
    seen: set[Any] = set()
    for file in (graph.file for graph in graphs):
        for node, inputs, outputs in walk(directory / "engine", file, seen):
            compare(node, inputs, outputs)
    return {key[0] for key in seen}


@pytest.mark.parametrize("make", parameters(QUICK))
def test_operators_of(make: Maker, tmp_path: Path) -> None:
    check(make, tmp_path)


@pytest.mark.full
def test_the_quick_ones_hold_every_operator(tmp_path: Path) -> None:
    found = [check(MAKERS[name], tmp_path / name) for name in QUICK]
    assert set().union(*found) == set(OPERATORS)


@pytest.mark.parametrize(("onnx_type", "values"), [
    (operators.FP4, E2M1), (operators.INT4, [*range(8), *range(-8, 0)]), (operators.UINT4, range(16)),
])  # fmt: skip
def test_4_bit_codes_low_nibble_first(onnx_type: int, values: Any) -> None:
    packed = torch.arange(256, dtype=torch.uint8)[:, None]
    found = operators.unpacked(packed, onnx_type=onnx_type).float().numpy()
    np.testing.assert_array_equal(found[:, 0], np.array([*values])[np.arange(256) % 16])
    np.testing.assert_array_equal(found[:, 1], np.array([*values])[np.arange(256) // 16])


def test_of_two_fp4_values_as_near_the_one_with_an_even_code() -> None:
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -2.5, 7.0, 0.0, 1.0, -5.0, -3.5])
    codes, scales = operators.quantize_fp4(x.clamp(max=6)[None], torch.tensor(1.0))
    assert scales.tolist() == [[1.0]]
    assert codes.tolist() == [[0, 1, 1, 2, 2, 4, 4, 6, 0, -1, -2, 6, 0, 1, -4, -4]]
