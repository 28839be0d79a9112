# SPDX-License-Identifier: Apache-2.0
"""The compiled attention operator against float64 equations, on every instruction set that this machine has."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from dflash_trt import _C
from dflash_trt.engine.graph.draft_graph import ATTENTION, PLUGIN_VERSION
from dflash_trt.engine.graph.onnx_builder import OPSET, PLUGIN_DOMAIN
from tests.plugins.cases import CORNER, FEATURES, REGULAR, Case
from tests.plugins.compare import assert_close
from tests.plugins.kernel.oracle import expect
from tests.plugins.tensors import draw
from tests.plugins.test_reference import as_carried, random_case

FLOAT32 = 2e-5  # of the values' size: the sums' rounding, and that of scores in the hundreds
INTEGERS = ("slot_ids", "context_lengths")
ISAS = _C.cpu_features()
CASES = [case for case in (*REGULAR, *FEATURES, *CORNER) if case.B and max(case.context_lengths) < 10_000]
SEEDS = range(40)
Feeds = dict[str, np.ndarray]


def feeds_of(case: Case) -> Feeds:
    """A call's inputs; the caches in FLOAT, NaN where nothing may be read."""
    tensors = draw(case)
    values = {field.name: getattr(tensors, field.name) for field in fields(tensors)}
    values["k_cache"] = values["k_cache"].float() * case.k_scale
    values["v_cache"] = values["v_cache"].float() * case.v_scale
    return {
        name: (value if name in INTEGERS else value.float()).numpy()
        for name, value in values.items()
        if value is not None
    }


def session(case: Case, feeds: Feeds, isa: str = "best", num_threads: int = 1) -> onnxruntime.InferenceSession:
    """The node alone."""
    types = {name: TensorProto.INT32 if name in INTEGERS else TensorProto.FLOAT for name in feeds}
    node = helper.make_node(
        ATTENTION,
        list(feeds),
        ["out"],
        domain=PLUGIN_DOMAIN,
        plugin_namespace=PLUGIN_DOMAIN,
        plugin_version=PLUGIN_VERSION,
        instruction_set=isa,
        **case.attributes(),
    )
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(name, types[name], None) for name in feeds],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(PLUGIN_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString()
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(_C.__file__)
    options.intra_op_num_threads = num_threads
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run(case: Case, feeds: Feeds, isa: str = "best", num_threads: int = 1) -> np.ndarray:
    (out,) = session(case, feeds, isa, num_threads).run(None, feeds)
    return out


def compare(case: Case, isa: str) -> None:
    expected = expect(as_carried(case), draw(case)).output
    actual = torch.from_numpy(run(case, feeds_of(case), isa)).double()
    assert_close(actual, expected, FLOAT32 * expected.abs().max() * torch.ones_like(expected))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case: Case) -> None:
    compare(case, "best")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("seed", [pytest.param(s, marks=() if s < 3 else pytest.mark.full) for s in SEEDS])
def test_random_cases(seed: int, isa: str) -> None:
    compare(random_case(seed), isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("D", [2, 6, 16, 50])
def test_head_dims_that_are_no_vectors(D: int, isa: str) -> None:
    """The plugin has none of them, but draft checkpoints may."""
    compare(Case(name="dims", N=6, G=3, D=D, S=5, context_lengths=(40, 0, 3), window=9, sinks=True), isa)


PAGED = Case(name="paged", N=4, G=2, S=8, L=2, layer=1, context_lengths=(70, 5, 96), causal=True, window=50)


def test_pages_in_any_order_are_the_slots_in_one() -> None:
    """[B, M] with pages of 32 rows; entries behind a context's own are never looked at."""
    feeds = feeds_of(PAGED)
    slots, L, rows, G, D = feeds["k_cache"].shape
    assert rows == 96
    order = np.random.default_rng(0).permutation(3 * slots)
    paged = dict(feeds)
    for name in ("k_cache", "v_cache"):
        pages = feeds[name].reshape(slots, L, 3, 32, G, D).swapaxes(1, 2).reshape(3 * slots, L, 32, G, D)
        paged[name] = np.empty_like(pages)
        paged[name][order] = pages
    table = order.reshape(slots, 3).astype(np.int32)
    table[1, 1:] = -1
    paged["slot_ids"] = table
    np.testing.assert_array_equal(run(PAGED, paged), run(PAGED, feeds))
    np.testing.assert_array_equal(run(PAGED, paged, num_threads=3), run(PAGED, feeds))


def test_a_row_depends_on_its_request_alone() -> None:
    feeds = feeds_of(PAGED)
    alone = replace(PAGED, context_lengths=PAGED.context_lengths[1:2])
    batched = {"qkv", "rope", *INTEGERS}
    one = {name: value[1:2] if name in batched else value for name, value in feeds.items()}
    np.testing.assert_array_equal(run(alone, one)[0], run(PAGED, feeds)[1])


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("context_lengths", [70, 5, 97], "context_lengths: expected what the pages hold"),
        ("context_lengths", [70, -1, 96], "context_lengths: expected what the pages hold"),
        ("slot_ids", [0, 3, 1], "slot_ids: expected pages of the cache"),
        ("slot_ids", [0, 1], r"expected slot_ids \[B\] or \[B, M\]"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, value: list[int], expected: str) -> None:
    feeds = feeds_of(PAGED) | {name: np.array(value, dtype=np.int32)}
    with pytest.raises(ort_errors.InvalidArgument, match=expected):
        run(PAGED, feeds)


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ort_errors.RuntimeException, match="found mmx"):
        run(PAGED, feeds_of(PAGED), isa="mmx")
