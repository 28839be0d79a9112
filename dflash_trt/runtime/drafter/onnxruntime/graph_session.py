# SPDX-License-Identifier: Apache-2.0
"""Sessions of ONNX Runtime on the graphs, lowered to FLOAT."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import onnx
import onnxruntime
import torch
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from dflash_trt import _C
from dflash_trt.errors import EngineError
from dflash_trt.runtime.drafter.onnxruntime.lowering import lower_to_cpu
from dflash_trt.runtime.drafter.onnxruntime.packed_linear import pack_linear_layers

MIN_SHARED_BYTES = 2**23
"""FLOAT bytes of a matrix from which a second thread is worth its wake-up: it sleeps, because it may not spin.
Measured (benchmarks/bench_ort_threads.py, two cores of an AMD EPYC): at 6 MiB two threads take 1.0 to 1.1 times as long
as one, at 13.5 0.8 to 1.1, at 24 0.75 to 1.1, at 63 0.6 to 0.8."""
REFUSALS = (
    DecodeError,
    ValueError,  # onnx raises this and the next for data that is not where the graph says
    onnx.checker.ValidationError,
    ort_errors.Fail,  # ONNX Runtime's errors (1.31) have no common base
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
)


def graph_session(directory: Path, file: str, expose: Sequence[str] = ()) -> onnxruntime.InferenceSession:
    """A session on the ONNX file `file` of an engine directory; `expose` names values that become further outputs.

    Raises EngineError for a file that ONNX Runtime does not load: weights that are links out of the directory, an
    operator that its version lacks.
    """
    try:
        return model_session(onnx.load(directory / file, load_external_data=False), directory, expose)
    except REFUSALS as error:
        raise EngineError(
            f"{directory / file}: expected a graph that onnxruntime {onnxruntime.__version__} loads, found: {error}",
            hint="copy the engine with files instead of links (cp -rL), or build it again",
        ) from None


def num_threads(model: onnx.ModelProto) -> int:
    """Threads for `model`: torch's number, which OMP_NUM_THREADS sets, or one if no weight is large enough for two."""
    largest = max((math.prod(weight.dims) for weight in model.graph.initializer), default=0)
    return torch.get_num_threads() if 4 * largest >= MIN_SHARED_BYTES else 1


def model_session(model: onnx.ModelProto, directory: Path, expose: Sequence[str] = ()) -> onnxruntime.InferenceSession:
    """A session on a graph in memory whose weights lie in `directory`."""
    options = onnxruntime.SessionOptions()
    # Torch and ONNX Runtime take turns on the same cores: a pool that spins would starve the other.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.intra_op_num_threads = num_threads(model)
    # The arena would double each time it grows; packed weights need their exact sizes only.
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    # Memory reuse compares each value with all free ones: 0.75 s for the 2,800 nodes of a draft in NVFP4. Passes take
    # the same time and memory without it, as the arena reuses freed memory.
    options.enable_mem_reuse = False
    options.register_custom_ops_library(_C.__file__)
    # The model comes from memory, its weights from files.
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(directory))
    packed = onnx.ModelProto()
    packed.CopyFrom(model)
    pack_linear_layers(packed, directory)
    lowered = lower_to_cpu(packed, expose).SerializeToString()
    return onnxruntime.InferenceSession(lowered, options, providers=["CPUExecutionProvider"])
