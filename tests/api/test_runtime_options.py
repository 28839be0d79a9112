# SPDX-License-Identifier: Apache-2.0
"""Settings of runtime and sampler: every front end has their names and defaults, and each reaches the sampling rule."""

import inspect
from typing import Any, get_type_hints

import click
import numpy as np
import pytest

from dflash_trt.api import runtime_options
from dflash_trt.api.known_settings import ELSEWHERE
from dflash_trt.api.runtime_options import DEFAULTS, RuntimeOptions
from dflash_trt.api.sampling_params import NUMBERS, SAMPLER_FIELDS, SamplingParams
from dflash_trt.cli import cli
from dflash_trt.errors import RequestError
from dflash_trt.llm import LLM
from dflash_trt.runtime.dynamo.generate_request import read_request
from dflash_trt.runtime.server.request.generation_request import parse_request
from dflash_trt.triton.model_file import EmbeddedModel
from dflash_trt.triton.request_tensors import read_inputs
from dflash_trt.triton.tensors import INPUTS
from dflash_trt.trtllm.llm_backend import sampling_arguments

VALUES: dict[str, Any] = {
    "temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": 0.125,
    "frequency_penalty": -0.5, "seed": 2**64 - 1,
}  # fmt: skip
NUMPY = {"FP32": np.float32, "INT32": np.int32, "UINT64": np.uint64}


def test_all_settings_arrive_everywhere() -> None:
    assert VALUES.keys() == SAMPLER_FIELDS.keys()
    params = SamplingParams(**VALUES)
    sampler = params.sampler()
    assert {name: getattr(sampler, name) for name in VALUES} == VALUES
    types = {spec.name: NUMPY.get(spec.data_type) for spec in INPUTS}
    tensors = {f"sampling_param_{name}": np.array([value]) for name, value in VALUES.items()}
    tensors = {name: tensor.astype(types[name]) for name, tensor in tensors.items()}
    asked = [
        parse_request({"prompt": "a", **VALUES}, "m", 100, None, is_chat=False).params,
        read_request({"token_ids": [1], "sampling_options": VALUES}, 100)[1],
        read_inputs({"text_input": np.array([b"a"]), **tensors}).params,
    ]
    assert [{name: getattr(each, name) for name in VALUES} for each in asked] == [VALUES] * 3
    assert sampling_arguments(params, is_speculative=False).items() >= VALUES.items()


@pytest.mark.parametrize("name", NUMBERS)
def test_bounds(name: str) -> None:
    field = NUMBERS[name]
    for bound, beyond in ((field.bounds.low, -1), (field.bounds.high, 1)):
        if abs(bound) < 1e300:
            number = field.type(bound)
            assert getattr(SamplingParams(**{name: number}), name) == number
            over = number + beyond * (2 if name == "top_k" else 1)  # top_k: -1 is 0
            with pytest.raises(RequestError, match=f"^{name}: expected "):
                SamplingParams(**{name: over})


FIELDS = RuntimeOptions.__struct_fields__
# generate decodes one prompt after the other, unless it is told otherwise: the seconds of each are shown. capture knows
# no engine that says a number.
OTHER_DEFAULTS = {("generate", "max_batch_size"): 1, ("capture", "max_batch_size"): 8}


def test_the_api_has_its_names_and_defaults() -> None:
    parameters = dict(inspect.signature(LLM.__init__).parameters)
    assert list(parameters) == ["self", "engine", "target", *FIELDS]
    types = get_type_hints(RuntimeOptions)
    for name in FIELDS:
        assert (parameters[name].default, parameters[name].annotation) == (getattr(DEFAULTS, name), types[name])
    assert set(EmbeddedModel.__struct_fields__) == {"engine", "target", "triton_config", *FIELDS}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("model", "LLM takes an engine directory, a draft or a deployment, then its target"),
        ("tensor_parallel_size", "a target that one GPU cannot hold is spread over all GPUs"),
        ("gpu_memory_utilization", "cache_gib sets the memory of the caches, in GiB"),
        ("max_num_seqs", "use max_batch_size"),
        ("draft_len", "did you mean draft_length?"),
        ("swap_space", "the settings are engine, "),
    ],
)
def test_the_api_refuses_other_names(name: str, hint: str) -> None:
    with pytest.raises(RequestError) as refused:
        LLM(**{name: 4})
    assert str(refused.value).startswith(f"{name}: there is no such setting\nhint: {hint}")


def test_sampling_parameters_have_no_other_names() -> None:
    with pytest.raises(RequestError, match=r"max_token: there is no such setting\nhint: did you mean max_tokens\?"):
        SamplingParams(max_token=4)  # type: ignore[call-arg]
    assert ELSEWHERE.keys().isdisjoint({*FIELDS, *SamplingParams.__struct_fields__})


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "dynamo", "verify", "capture", "triton-repo"])
def test_commands_have_its_names_and_defaults(command: str) -> None:
    options = {p.name: p for p in cli.commands[command].params if isinstance(p, click.Option) and p.name in FIELDS}
    assert options.keys() >= ({*FIELDS} if command in ("serve", "dynamo") else {"dtype"})
    for name, option in options.items():
        assert option.default == OTHER_DEFAULTS.get((command, name), getattr(DEFAULTS, name)), name


@pytest.mark.parametrize("name", runtime_options.NUMBERS)
def test_bounds_of_the_runtime(name: str) -> None:
    field = runtime_options.NUMBERS[name]
    for bound, beyond in ((field.bounds.low, -1), (field.bounds.high, 1)):
        assert getattr(RuntimeOptions(**{name: field.type(bound)}), name) == bound
        with pytest.raises(RequestError, match=f"^{name}: expected {field.bounds.expected[:4]}"):
            RuntimeOptions(**{name: field.type(bound) + beyond})
    for value in (True, "4", float("nan")):
        with pytest.raises(RequestError, match=f"^{name}: expected "):
            RuntimeOptions(**{name: value})


def test_generate_has_the_sampling_settings_and_their_defaults() -> None:
    with cli.commands["generate"].make_context("generate", ["engine", "def f(", "--target", "target"]) as context:
        fields = (*SAMPLER_FIELDS, "max_tokens", "stop", "ignore_eos", "logprobs")
        assert SamplingParams(**{name: context.params[name] for name in fields}) == SamplingParams()


@pytest.mark.parametrize("value", [None, "yes", 1])
def test_a_switch_is_a_truth_value(value: object) -> None:
    with pytest.raises(RequestError, match="enable_prefix_caching: expected True or False"):
        RuntimeOptions(enable_prefix_caching=value)  # type: ignore[arg-type]


def test_an_unknown_executor() -> None:
    with pytest.raises(RequestError, match="executor: expected auto, onnxruntime, torch or tensorrt, found 'onnx'"):
        RuntimeOptions(executor="onnx")  # type: ignore[arg-type]
