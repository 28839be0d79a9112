# SPDX-License-Identifier: Apache-2.0
"""The kernel as TensorRT starts it: through the plugin's virtual functions, on device addresses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dflash_trt.engine.plans.tensorrt_api import plugin_library
from tests.gpu.launches import Launch, bits
from tests.plugins import abi
from tests.plugins.abi import Creator, Desc, Plugin, attribute, desc
from tests.plugins.cases import BF16, F16, FP8, Case
from tests.plugins.tensors import draw, inputs, output

pytestmark = pytest.mark.gpu

TYPES = {
    BF16: abi.BF16, F16: abi.HALF, FP8: abi.FP8, torch.float32: abi.FLOAT, torch.int32: abi.INT32,
    torch.int64: abi.INT64,
}  # fmt: skip
CASES = [
    Case(name="split", context_lengths=(3000, 7), sinks=True),
    Case(name="fused", bias=True, sinks=True, output_scale=0.02, context_lengths=(3000, 7)),
    Case(name="whole", D=128, cache_dtype=FP8, k_scale=0.02, v_scale=0.03, window=40, context_lengths=(100,) * 3),
]


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    made = request.param
    assert isinstance(made, Case)
    return made


@pytest.fixture
def plugin(case: Case) -> Iterator[Plugin]:
    fields = [attribute(name, value) for name, value in case.attributes().items()]
    made = Creator(plugin_library()).create(fields, abi.BUILD)
    assert made is not None
    yield made
    made.close()


def descs(given: list[torch.Tensor], out: torch.Tensor) -> tuple[list[Desc], Desc]:
    every = [desc(tuple(tensor.shape), TYPES[tensor.dtype]) for tensor in given]
    return every, desc(tuple(out.shape), TYPES[out.dtype])


def test_enqueue_gives_the_bits_of_the_binding(plugin: Plugin, case: Case) -> None:
    tensors = draw(case, "cuda")
    out = output(case, tensors)
    given = list(inputs(case, tensors).values())
    ins, of_out = descs(given, out.tensor)
    profile = [abi.dynamic(tuple(tensor.shape), TYPES[tensor.dtype]) for tensor in (*given, out.tensor)]
    workspace = torch.empty(max(1, plugin.workspace(profile[:-1], profile[-1:])), dtype=torch.uint8, device="cuda")
    assert plugin.configure(profile[:-1], profile[-1:]) == 0
    running = plugin.attach()
    assert running.on_shape_change(ins, [of_out]) == 0
    addresses = [tensor.data_ptr() for tensor in (*given, out.tensor)]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    assert running.enqueue(ins, of_out, addresses, workspace.data_ptr(), stream.cuda_stream) == 0
    torch.cuda.synchronize()
    running.close()
    out.assert_guarded()
    assert torch.equal(bits(out.tensor), bits(Launch(case, tensors).run()))
