# SPDX-License-Identifier: Apache-2.0
"""config.pbtxt, written through Triton's own protobuf schema."""

from __future__ import annotations

from google.protobuf import text_format  # type: ignore[import-untyped]
from tritonclient.grpc import model_config_pb2

from dflash_trt.triton.tensors import INPUTS, OUTPUTS, TEXT_INPUT


def config_text(name: str, *, decoupled: bool) -> str:
    """The file's text: one instance of the Python backend, whose own runtime batches."""
    config = model_config_pb2.ModelConfig(name=name, backend="python", max_batch_size=0)
    config.model_transaction_policy.decoupled = decoupled
    config.instance_group.add(count=1, kind=model_config_pb2.ModelInstanceGroup.KIND_CPU)
    for spec in INPUTS:
        data_type = model_config_pb2.DataType.Value(f"TYPE_{spec.data_type}")
        config.input.add(name=spec.name, data_type=data_type, dims=[spec.length], optional=spec.name != TEXT_INPUT)
    for spec in OUTPUTS:
        data_type = model_config_pb2.DataType.Value(f"TYPE_{spec.data_type}")
        config.output.add(name=spec.name, data_type=data_type, dims=[spec.length])
    return str(text_format.MessageToString(config))
