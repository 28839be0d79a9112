# SPDX-License-Identifier: Apache-2.0
"""Settings of the runtime stand in one struct: API, command line and Triton have its names and its defaults."""

from __future__ import annotations

import inspect

import click
import pytest

from dflash_trt.api.runtime_options import DEFAULTS, RuntimeOptions
from dflash_trt.api.sampling_params import SAMPLER_FIELDS, SamplingParams
from dflash_trt.cli import cli
from dflash_trt.errors import RequestError
from dflash_trt.llm import LLM
from dflash_trt.runtime.open_backend import open_backend, open_embedded
from tests.paths import FIXTURES

FIELDS = RuntimeOptions.__struct_fields__
# generate decodes one prompt after the other, unless it is told otherwise: the seconds of each are shown.
OTHER_DEFAULTS = {("generate", "max_batch_size"): 1}


def test_the_api_has_its_names_and_defaults() -> None:
    parameters = dict(inspect.signature(LLM.__init__).parameters)
    settings = {name: parameters[name].default for name in parameters.keys() - {"self", "engine", "target"}}
    assert settings == {name: getattr(DEFAULTS, name) for name in FIELDS if name != "num_ranks"}


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "verify", "capture"])
def test_commands_have_its_names_and_defaults(command: str) -> None:
    options = {p.name: p for p in cli.commands[command].params if isinstance(p, click.Option) and p.name in FIELDS}
    assert options.keys() >= {"dtype"}
    for name, option in options.items():
        assert option.default == OTHER_DEFAULTS.get((command, name), getattr(DEFAULTS, name)), name


def test_generate_has_the_sampling_settings_and_their_defaults() -> None:
    with cli.commands["generate"].make_context("generate", ["engine", "def f(", "--target", "target"]) as context:
        fields = (*SAMPLER_FIELDS, "max_tokens", "stop", "ignore_eos", "logprobs")
        assert SamplingParams(**{name: context.params[name] for name in fields}) == SamplingParams()


@pytest.mark.parametrize("value", [None, "yes", 1])
def test_a_switch_is_a_truth_value(value: object) -> None:
    with pytest.raises(RequestError, match="enable_prefix_caching: expected True or False"):
        RuntimeOptions(enable_prefix_caching=value)  # type: ignore[arg-type]


def test_ranks_are_joined_elsewhere() -> None:
    with pytest.raises(RequestError, match="num_ranks: expected 1, found 2"):
        open_embedded(None, RuntimeOptions(num_ranks=2))  # type: ignore[arg-type]


def test_a_deployment_says_its_settings_itself() -> None:
    with pytest.raises(RequestError, match=r"dtype: expected none, because the deployment file .* sets it"):
        open_backend("gpt-oss-120b.b300x8.latency", str(FIXTURES / "tiny-qwen3"), RuntimeOptions(dtype="bfloat16"))
