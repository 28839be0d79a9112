# SPDX-License-Identifier: Apache-2.0
"""ai-dynamo's own parsers take what `serve-config --runtime dynamo-*` gives to frontend and workers."""

from __future__ import annotations

import json
import subprocess

import pytest
import yaml

from dflash_trt.deploy.schema import load_schema
from tests.cli.commands import run
from tests.deploy.deployments import NAMES
from tests.runtime.dynamo.cluster import dynamo_python

pytestmark = pytest.mark.full
# Prints what is left for the runtime's own parser. TensorRT-LLM is not here: Dynamo asks it for defaults alone.
PARSE = """
import argparse, json, sys
from unittest.mock import MagicMock
for name in ("tensorrt_llm", "tensorrt_llm.llmapi"):
    sys.modules[name] = MagicMock()
from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup
from dynamo.frontend.frontend_args import FrontendArgGroup
from dynamo.trtllm.backend_args import DynamoTrtllmArgGroup

def parse(words, *groups):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for group in groups:
        group().add_arguments(parser)
    return parser.parse_known_args(words)[1]

left = []
for runtime, frontend, worker in json.load(sys.stdin):
    assert parse(frontend, FrontendArgGroup) == []
    own = [DynamoTrtllmArgGroup] if runtime == "dynamo-trtllm" else []
    left.append([runtime, parse(worker, DynamoRuntimeArgGroup, *own)])
print(json.dumps(left))
"""
# Of `vllm serve`, and no arguments of its engine (vllm/entrypoints/openai/cli_args.py of 0.33.0), which workers take.
SERVERS = {"host", "port", "enable_auto_tool_choice", "tool_call_parser", "chat_template", "api_key"}


def test_dynamo_takes_every_argument() -> None:
    python, asked = dynamo_python(), []
    for name in NAMES:
        for runtime in ("dynamo-trtllm", "dynamo-vllm", "dynamo-sglang"):
            written = run("serve-config", name, "--runtime", runtime, "--image", "registry/image:1")
            if "which cannot serve this deployment" not in written.stderr:
                *_, graph = yaml.safe_load_all(written.stdout)
                pods = [component["podTemplate"]["spec"] for component in graph["spec"]["components"]]
                asked.append([runtime, *(pod["containers"][0]["args"] for pod in pods)])
    assert len(asked) > 2 * len(NAMES)
    result = subprocess.run(
        [python, "-c", PARSE], input=json.dumps(asked), capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    vllm = load_schema("vllm", None).names()
    for runtime, left in json.loads(result.stdout):
        if runtime == "dynamo-trtllm":
            assert left == []
        elif runtime == "dynamo-vllm":
            names = [word[2:].replace("-", "_") for word in left if word.startswith("--")]
            engine = [
                name for name in names if name != "model" and name.removeprefix("no_") not in vllm.keys() - SERVERS
            ]
            assert engine == []


@pytest.mark.parametrize(
    "words", [["--dyn-tool-call-parser", "openai"], ["--dyn-reasoning-parser", "gpt-oss"], ["--router-mode", "events"]]
)
def test_a_name_of_another_runtime_is_refused(words: list[str]) -> None:
    frontend, worker = ([], words) if "dyn" in words[0] else (words, [])
    result = subprocess.run(
        [dynamo_python(), "-c", PARSE], input=json.dumps([["dynamo-vllm", frontend, worker]]), capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "invalid choice" in result.stderr
