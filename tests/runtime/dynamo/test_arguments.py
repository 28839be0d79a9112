# SPDX-License-Identifier: Apache-2.0
"""Requests of Dynamo to our workers, and arguments of `serve-config --runtime dynamo-*` in ai-dynamo's own parsers."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
import yaml

from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.deploy.schema import load_schema
from dflash_trt.errors import RequestError
from dflash_trt.runtime.dynamo.generate_request import read_request
from tests.cli.commands import run
from tests.deploy.deployments import NAMES
from tests.runtime.dynamo.cluster import dynamo_python
from tests.waiting import PATIENCE

SENT: dict[str, Any] = {
    "model": "tiny",
    "token_ids": [1, 2, 3],
    "stop_conditions": dict.fromkeys(
        ("max_tokens", "stop", "stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden", "min_tokens",
         "ignore_eos", "max_thinking_tokens")
    ),
    "sampling_options": dict.fromkeys(
        ("n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k",
         "min_p", "use_beam_search", "length_penalty", "seed", "include_stop_str_in_output", "guided_decoding")
    ),
    "output_options": dict.fromkeys(
        ("logprobs", "prompt_logprobs", "skip_special_tokens", "formatted_prompt", "return_tokens_as_token_ids")
    ),
    "eos_token_ids": [0], "annotations": [], "routing": {}, "router_config_override": None,
}  # fmt: skip


def sent(**fields: object) -> dict[str, Any]:
    """A request in which `fields` are not null, each in the group that has it."""
    groups = {
        name: {field: fields.pop(field, None) for field in group} if isinstance(group, dict) else group
        for name, group in SENT.items()
    }
    return groups | fields


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, SamplingParams(temperature=1.0, max_tokens=61)),
        ({"max_tokens": 7, "temperature": 0.0}, SamplingParams(max_tokens=7)),
        (
            {"temperature": 0.699999988079071, "top_p": 0.8999999761581421, "min_p": 0.10000000149011612},
            SamplingParams(temperature=0.7, top_p=0.9, min_p=0.1, max_tokens=61),
        ),
        (
            {"top_k": 5, "seed": 3, "presence_penalty": 0.5, "frequency_penalty": -1.0, "repetition_penalty": 2.0},
            SamplingParams(
                temperature=1.0, max_tokens=61, top_k=5, seed=3,
                presence_penalty=0.5, frequency_penalty=-1.0, repetition_penalty=2.0,
            ),
        ),
        (
            {"stop": ["a"], "stop_token_ids": [4], "stop_token_ids_visible": [5], "stop_token_ids_hidden": [0]},
            SamplingParams(temperature=1.0, max_tokens=61, stop=["a"], stop_token_ids=[0, 4, 5]),
        ),
        (
            {"ignore_eos": True, "logprobs": 1},
            SamplingParams(temperature=1.0, max_tokens=61, ignore_eos=True, logprobs=True),
        ),
        ({"n": 1, "min_tokens": 0, "guided_decoding": {}}, SamplingParams(temperature=1.0, max_tokens=61)),
        ({"min_tokens": 9}, SamplingParams(temperature=1.0, max_tokens=61, min_tokens=9)),
    ],
)  # fmt: skip
def test_honoured(fields: dict[str, Any], expected: SamplingParams) -> None:
    assert read_request(sent(**fields), max_length=64) == ([1, 2, 3], expected)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2}, {"best_of": 2}, {"use_beam_search": True}, {"length_penalty": 0.5},
        {"include_stop_str_in_output": True}, {"guided_decoding": {"regex": "a"}}, {"max_thinking_tokens": 9},
        {"logprobs": 2}, {"prompt_logprobs": 0}, {"multi_modal_data": {"image_url": []}}, {"prefill_result": {}},
        {"bootstrap_info": {}}, {"seed": -3}, {"top_p": 1.5}, {"max_tokens": 0},
    ],
    ids=str,
)  # fmt: skip
def test_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(fields))):
        read_request(sent(**fields), max_length=64)


def test_no_field_is_forgotten() -> None:
    """Each is honoured, refused, or changes nothing that a worker does."""
    text = "frontend's own: skip_special_tokens formatted_prompt return_tokens_as_token_ids"
    for group in ("stop_conditions", "sampling_options", "output_options"):
        for field in SENT[group]:
            value: object = {"x": 1} if field == "guided_decoding" else [3] if "stop" in field else 3
            try:
                asked = read_request(sent(**{field: value}), max_length=64)
            except RequestError:
                continue
            assert asked != read_request(sent(), max_length=64) or field in text, field


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
# Arguments of `vllm serve` but not of its engine (vllm/entrypoints/openai/cli_args.py of 0.33.0), which workers take.
SERVERS = {"host", "port", "enable_auto_tool_choice", "tool_call_parser", "chat_template", "api_key"}


@pytest.mark.full
def test_dynamo_takes_every_argument() -> None:
    python, asked = dynamo_python(), []
    for name in NAMES:
        for runtime in ("dynamo-trtllm", "dynamo-vllm", "dynamo-sglang"):
            written = run("serve-config", name, "--runtime", runtime, "--image", "registry/image:1")
            if " cannot be served by " not in written.stderr:
                *_, graph = yaml.safe_load_all(written.stdout)
                pods = [component["podTemplate"]["spec"] for component in graph["spec"]["components"]]
                asked.append([runtime, *(pod["containers"][0]["args"] for pod in pods)])
    assert len(asked) > 2 * len(NAMES)
    result = subprocess.run(
        [python, "-c", PARSE], input=json.dumps(asked), capture_output=True, text=True, timeout=PATIENCE, check=False
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
