# SPDX-License-Identifier: Apache-2.0
"""The kernel as TensorRT starts it: through the plugin's virtual functions, on device addresses."""

from __future__ import annotations

import pytest
import torch

from dflash_trt.engine.plans.tensorrt_api import plugin_library
from tests.gpu.launches import Launch, PluginLaunch, bits
from tests.plugins.cases import FP8, Case
from tests.plugins.tensors import draw

pytestmark = pytest.mark.gpu

CASES = [
    Case(name="split", context_lengths=(3000, 7), sinks=True),
    Case(name="fused", bias=True, sinks=True, output_scale=0.02, context_lengths=(3000, 7)),
    Case(name="whole", D=128, cache_dtype=FP8, k_scale=0.02, v_scale=0.03, window=40, context_lengths=(100,) * 3),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_enqueue_gives_the_bits_of_the_binding(case: Case) -> None:
    tensors = draw(case, "cuda")
    launch, expected = PluginLaunch(plugin_library(), case, tensors), Launch(case, tensors).run()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.equal(bits(launch.run()), bits(expected))
