# SPDX-License-Identifier: Apache-2.0
"""Threads of ONNX Runtime: one where no weight is worth a second, else as many as torch has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from dflash_trt.runtime.drafter.onnxruntime.ort_session import model_session


@pytest.fixture(params=[1, 3])
def torch_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(("size", "is_shared"), [(128, False), (1448, False), (1449, True)])
def test_threads_by_the_largest_weight(torch_threads: int, size: int, is_shared: bool, tmp_path: Path) -> None:
    ports = f"(float[1,{size}] x) => (float[1,{size}] y)"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> one {ports} {{ y = MatMul(x, w) }}')
    model.graph.initializer.append(numpy_helper.from_array(np.ones((size, size), np.float32), "w"))
    session = model_session(model, tmp_path)
    assert session.get_session_options().intra_op_num_threads == (torch_threads if is_shared else 1)
