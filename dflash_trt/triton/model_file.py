# SPDX-License-Identifier: Apache-2.0
"""model.yaml: the runtime's arguments, and under `triton_config` how it is served."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml

from dflash_trt.api.runtime_options import RuntimeOptions
from dflash_trt.errors import ConfigError, RequestError, shown
from dflash_trt.files.strict_yaml import load_yaml, read_yaml

MODEL_FILE = "model.yaml"
TRITON_CONFIG = "triton_config"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
Positive = Annotated[int, msgspec.Meta(ge=1)]


class TritonConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the model is served."""

    runtime: Literal["trtllm", "embedded"]
    max_batch_size: Literal[0] = 0
    """0: a request is one prompt, and Triton forms no batches; the runtime does."""
    decoupled: bool = True
    """Whether a request may have many responses; config.pbtxt says the same."""
    cancellation_check_period_ms: Positive = 100
    """How often running requests are checked for cancellation."""
    stream_deltas: bool = False
    """Whether streamed responses have only the new text; else all text so far, as in NVIDIA's llmapi model."""
    engine_mode: bool = False
    """Whether TensorRT-LLM's own drafter is replaced by our TensorRT plans, in every rank."""


class EmbeddedModel(RuntimeOptions, frozen=True):
    """The whole file for the embedded runtime: engine, target and settings, as dflash_trt.LLM takes them."""

    engine: str
    triton_config: TritonConfig
    target: str | None = None


class TrtllmModel(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file for TensorRT-LLM."""

    arguments: dict[str, Any]
    """Keyword arguments of tensorrt_llm.LLM."""
    triton_config: TritonConfig


def check_name(name: str) -> None:
    """Raise ConfigError unless `name` can be a folder, and part of a URL."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"--name: expected letters, digits, '_', '-' and '.', the first a letter, digit or '_', found {shown(name)}"
        )


def model_text(arguments: dict[str, Any], config: TritonConfig) -> str:
    """The file's text; the same settings give the same bytes."""
    document = {**arguments, TRITON_CONFIG: msgspec.to_builtins(config)}
    return str(yaml.safe_dump(document, sort_keys=False, default_flow_style=False, width=120))


def read_model(file: Path) -> EmbeddedModel | TrtllmModel:
    """Reads model.yaml; ConfigError for a file that is neither runtime's."""
    document = read_yaml(file, ConfigError)
    if not isinstance(document, dict) or not isinstance(document.get(TRITON_CONFIG), dict):
        raise ConfigError(f"{file}: missing key {TRITON_CONFIG}")
    try:
        if document[TRITON_CONFIG].get("runtime") == "embedded":
            return load_yaml(file, EmbeddedModel, ConfigError)
        config = msgspec.convert(document.pop(TRITON_CONFIG), TritonConfig)
    except RequestError as problem:
        raise ConfigError(f"{file}: {problem.message}") from None
    except msgspec.ValidationError as problem:
        raise ConfigError(f"{file}: {TRITON_CONFIG}: {problem}") from None
    return TrtllmModel(arguments=document, triton_config=config)
