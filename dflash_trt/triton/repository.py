# SPDX-License-Identifier: Apache-2.0
"""Write a model repository for Triton Inference Server, and the commands that use it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from google.protobuf import text_format  # type: ignore[import-untyped]
from tritonclient.grpc import model_config_pb2

from dflash_trt.errors import BuildError
from dflash_trt.files.command import argument, command_line
from dflash_trt.files.read import read_bytes
from dflash_trt.files.write import OutputKind, new_directory
from dflash_trt.triton.model_file import MODEL_FILE, TritonConfig, check_name, model_text
from dflash_trt.triton.tensors import INPUTS, OUTPUTS, TEXT_INPUT

HTTP_PORT = 8000
PROMPT = {"text_input": "def quicksort(", "streaming": True, "sampling_param_max_tokens": 64}

CONFIG_FILE = "config.pbtxt"
VERSION = "1"
ENTRY = """\
# SPDX-License-Identifier: Apache-2.0
from dflash_trt.triton.model import TritonPythonModel as TritonPythonModel
"""


def is_repository(directory: Path) -> bool:
    """Whether a directory has nothing but one model of ours."""
    entries = list(directory.iterdir())
    if len(entries) != 1:
        return False
    model = entries[0]
    entry = model / VERSION / "model.py"
    if not all(file.is_file() for file in (model / CONFIG_FILE, entry, model / VERSION / MODEL_FILE)):
        return False
    try:
        return read_bytes(entry, BuildError, limit=len(ENTRY)) == ENTRY.encode()
    except BuildError:
        return False


REPOSITORY = OutputKind(name="a repository that this command wrote", recognizes=is_repository, option="-o REPO")


def write_repository(
    output: Path, name: str, arguments: dict[str, Any], config: TritonConfig, *, force: bool = False
) -> None:
    """Write `output` with one model `name`, whose runtime takes `arguments`.

    Output is deterministic. Raises ConfigError for an invalid name, BuildError when `output` cannot be written; then
    nothing is left.
    """
    check_name(name)
    with new_directory(output, REPOSITORY, force=force) as directory:
        version = directory / name / VERSION
        version.mkdir(parents=True)
        (version.parent / CONFIG_FILE).write_text(config_text(name, decoupled=config.decoupled))
        (version / "model.py").write_text(ENTRY)
        (version / MODEL_FILE).write_text(model_text(arguments, config))


def config_text(name: str, *, decoupled: bool) -> str:
    """config.pbtxt in Triton's own schema: one instance of the Python backend, whose own runtime batches."""
    config = model_config_pb2.ModelConfig(name=name, backend="python", max_batch_size=0)
    config.model_transaction_policy.decoupled = decoupled
    config.instance_group.add(count=1, kind=model_config_pb2.ModelInstanceGroup.KIND_CPU)
    for specs, tensors, option in ((INPUTS, config.input, True), (OUTPUTS, config.output, False)):
        for spec in specs:
            data_type = model_config_pb2.DataType.Value(f"TYPE_{spec.data_type}")
            optional = {"optional": spec.name != TEXT_INPUT} if option else {}
            tensors.add(name=spec.name, data_type=data_type, dims=[spec.length], **optional)
    return str(text_format.MessageToString(config))


def server_command(repository: Path, host: str) -> list[str]:
    """tritonserver with all services bound to `host`; config.pbtxt is complete, so none is generated."""
    addresses = [f"--{service}-address={host}" for service in ("http", "grpc", "metrics")]
    return ["tritonserver", f"--model-repository={repository}", *addresses, "--disable-auto-complete-config"]


def instructions(repository: Path, name: str, *, host: str) -> str:
    """Commands that start the server, check that it is ready and send a request."""
    host = argument(host, "--host")
    address = f"[{host}]:{HTTP_PORT}" if ":" in host else f"{host}:{HTTP_PORT}"
    server = command_line(server_command(repository, host))
    ready = command_line(["curl", "-sf", f"{address}/v2/health/ready"])
    request = command_line(["curl", "-sN", "-d", json.dumps(PROMPT), f"{address}/v2/models/{name}/generate_stream"])
    return (
        f"start the server, in this Python environment:\n  {server}\n"
        f"check that it is ready, and send a request:\n  {ready}\n  {request}"
    )
