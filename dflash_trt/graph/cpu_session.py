# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime sessions on the graphs, lowered to the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
import onnxruntime

from dflash_trt.graph.cpu_lowering import lower_to_cpu


def cpu_session(directory: Path, file: str, expose: Sequence[str] = ()) -> onnxruntime.InferenceSession:
    """A session on the ONNX file `file` of an engine directory, lowered to FLOAT on the CPU.

    `expose` names values inside the graph that become further outputs (calibration, error by layer).
    """
    return model_session(onnx.load(directory / file, load_external_data=False), directory, expose)


def model_session(model: onnx.ModelProto, directory: Path, expose: Sequence[str] = ()) -> onnxruntime.InferenceSession:
    """The same for a graph in memory whose weights lie in `directory`."""
    options = onnxruntime.SessionOptions()
    # Torch and ONNX Runtime take turns on the same cores: a pool that spins would starve the other.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # The model comes from memory, its weights from the directory.
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(directory.resolve()))
    return onnxruntime.InferenceSession(
        lower_to_cpu(model, expose).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
