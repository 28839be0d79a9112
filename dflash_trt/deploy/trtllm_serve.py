# SPDX-License-Identifier: Apache-2.0
"""Arguments of trtllm-serve: its own options, and the YAML file that it names, which wins.

Read in tensorrt_llm/commands/serve.py of 1.4.0rc1, a click command, which takes no abbreviations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dflash_trt.deploy.finding import WARNING, Finding
from dflash_trt.deploy.script import Server
from dflash_trt.errors import ConfigError
from dflash_trt.files.read import read_text
from dflash_trt.files.strict_yaml import MAX_BYTES, yaml_document

FILES = ("config", "extra_llm_api_options")
KEYS = {
    "tp_size": "tensor_parallel_size", "tensor_parallel_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size", "pipeline_parallel_size": "pipeline_parallel_size",
    "ep_size": "moe_expert_parallel_size", "moe_expert_parallel_size": "moe_expert_parallel_size",
    "cp_size": "context_parallel_size", "context_parallel_size": "context_parallel_size",
    "gpus_per_node": "gpus_per_node", "max_batch_size": "max_batch_size", "max_num_tokens": "max_num_tokens",
    "max_seq_len": "max_seq_len", "max_beam_width": "max_beam_width", "reasoning_parser": "reasoning_parser",
    "kv_cache_free_gpu_memory_fraction": "kv_cache_config.free_gpu_memory_fraction",
    "free_gpu_memory_fraction": "kv_cache_config.free_gpu_memory_fraction",
    "num_postprocess_workers": "num_postprocess_workers", "trust_remote_code": "trust_remote_code",
    "fail_fast_on_attention_window_too_large": "", "tool_parser": "", "host": "", "port": "", "backend": "",
    "log_level": "", "tokenizer": "", "revision": "", "hf_revision": "", "served_model_name": "",
    "custom_module_dirs": "", "chat_template": "", "metadata_server_config_file": "", "server_role": "",
    "allow_request_chat_template": "",
}  # fmt: skip
"""LLM arguments by option; empty for what is no LLM argument."""


def trtllm_document(server: Server, script: Path) -> tuple[dict[str, Any], list[Finding]]:
    """The arguments of one trtllm-serve, and its unknown options; ConfigError for a file that is not here."""
    findings: list[Finding] = []
    document: dict[str, Any] = {}
    named: dict[str, Any] = {}
    words = list(server.words)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            continue  # the model
        option, is_joined, value = word[2:].partition("=")
        option = option.replace("-", "_")
        if option in FILES:
            named |= _file(value if is_joined else words.pop(0) if words else "", server, script)
        elif option not in KEYS:
            problem = "not known to this schema (trtllm-serve 1.4.0rc1)"
            findings.append(Finding("unknown-key", WARNING, option, problem, "look it up in trtllm-serve --help"))
            words = words[1:] if words and not words[0].startswith("--") and not is_joined else words
        elif option == "trust_remote_code":
            document[option] = True
        else:
            text = value if is_joined else words.pop(0) if words else ""
            _set(document, KEYS[option], yaml_document(text, script, ConfigError))
    if isinstance(pool := document.get("kv_cache_config"), dict) and isinstance(named.get("kv_cache_config"), dict):
        named["kv_cache_config"] = pool | named["kv_cache_config"]
    return document | named, findings


def file_words(words: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Each YAML file that a command names, with the position of its word, which `--config=FILE` shares."""
    for index, word in enumerate(words):
        option, is_joined, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and option.replace("-", "_") in FILES:
            if is_joined:
                yield index, value
            elif index + 1 < len(words):
                yield index + 1, words[index + 1]


def _set(document: dict[str, Any], key: str, value: Any) -> None:
    outer, _, inner = key.partition(".")
    if inner:
        document.setdefault(outer, {})[inner] = value
    elif key:
        document[key] = value


def _file(name: str, server: Server, script: Path) -> dict[str, Any]:
    """The YAML file that a command names: written by the script itself, or beside it."""
    path = script.parent / name
    text = server.files.get(name)
    if text is None and not path.is_file():
        raise ConfigError(
            f"{script}: expected the file that it names, {name}, beside it, found none",
            hint=f"dflash-trt serve-config --check {name} --runtime trtllm",
        )
    read = yaml_document(read_text(path, ConfigError, limit=MAX_BYTES) if text is None else text, path, ConfigError)
    if not isinstance(read, dict):
        raise ConfigError(f"{path}: expected a mapping of LLM arguments, found something else")
    return read
