# SPDX-License-Identifier: Apache-2.0
"""The commands that start a server on a model repository and send it a request."""

from __future__ import annotations

import json
from pathlib import Path

from dflash_trt.files.command import argument, command_line

HTTP_PORT = 8000
PROMPT = {"text_input": "def quicksort(", "streaming": True, "sampling_param_max_tokens": 64}


def server_command(repository: Path, host: str) -> list[str]:
    """tritonserver with all services bound to `host`; config.pbtxt is complete, so none is generated."""
    addresses = [f"--{service}-address={host}" for service in ("http", "grpc", "metrics")]
    return ["tritonserver", f"--model-repository={repository}", *addresses, "--disable-auto-complete-config"]


def instructions(repository: Path, name: str, *, host: str) -> str:
    """Commands that start the server, check that it is ready and send a request."""
    host = argument(host, "--host")
    server = command_line(server_command(repository, host))
    address = f"[{host}]:{HTTP_PORT}" if ":" in host else f"{host}:{HTTP_PORT}"
    ready = command_line(["curl", "-sf", f"{address}/v2/health/ready"])
    lines = ["start the server, in this Python environment:", f"  {server}"]
    request = command_line(["curl", "-sN", "-d", json.dumps(PROMPT), f"{address}/v2/models/{name}/generate_stream"])
    lines += ["check that it is ready, and send a request:", f"  {ready}", f"  {request}"]
    return "\n".join(lines)
