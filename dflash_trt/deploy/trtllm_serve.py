# SPDX-License-Identifier: Apache-2.0
"""Arguments of trtllm-serve and dynamo.trtllm: their own options, and the YAML file that they name, which wins.

Read in tensorrt_llm/commands/serve.py of 1.4.0rc1, a click command, which takes no abbreviations, and in
dynamo/trtllm/backend_args.py and dynamic_flags.py of ai-dynamo 1.6.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dflash_trt.deploy.finding import UNCHECKED, WARNING, Finding
from dflash_trt.deploy.foreign.dynamo_words import dynamo_flags, is_dynamo
from dflash_trt.deploy.foreign.named_file import named_arguments
from dflash_trt.deploy.runtime_arguments import merged, nested
from dflash_trt.deploy.script import Server
from dflash_trt.errors import ConfigError
from dflash_trt.files.strict_yaml import yaml_document

FILES = ("config", "extra_llm_api_options", "extra_engine_args")
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
DYNAMO_KEYS = {
    "expert_parallel_size": "moe_expert_parallel_size", "enable_attention_dp": "enable_attention_dp",
    "kv_block_size": "kv_cache_config.tokens_per_block", "load_format": "load_format",
}  # fmt: skip
"""LLM arguments that Dynamo's worker gives another name, or takes besides."""
SWITCHES = ("trust_remote_code", "fail_fast_on_attention_window_too_large", "enable_attention_dp")
OVERRIDES = "override_engine_args"
DYNAMIC = "trtllm."
"""Beginning of Dynamo's flags for any key of the file."""


def trtllm_document(server: Server, script: Path) -> tuple[dict[str, Any], list[Finding], bool]:
    """The arguments of one server, findings, and whether all files were opened; ConfigError for a missing file."""
    findings: list[Finding] = []
    is_whole = True
    document: dict[str, Any] = {}
    named: dict[str, Any] = {}
    overrides: list[dict[str, Any]] = []
    words = list(server.words)
    own = dynamo_flags("trtllm") if is_dynamo(server) else frozenset()
    keys = dict.fromkeys(own, "") | KEYS | (DYNAMO_KEYS if own else {})
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            continue  # the model
        option, is_joined, value = word[2:].partition("=")
        option = option.replace("-", "_")
        if option in FILES:
            name = value if is_joined else words.pop(0) if words else ""
            found = named_arguments(name, server.files, script)
            if isinstance(found, Finding):
                findings.append(found)
                is_whole = False
            else:
                named |= found
        elif own and option.startswith(DYNAMIC):
            text = value if is_joined else words.pop(0) if words else ""
            overrides.append(nested(option.removeprefix(DYNAMIC), yaml_document(text, script, ConfigError)))
        elif own and option == OVERRIDES:
            text = value if is_joined else words.pop(0) if words else ""
            overrides += [read] if isinstance(read := yaml_document(text, script, ConfigError), dict) else []
        elif option not in keys:
            problem = "not known to this schema (trtllm-serve 1.4.0rc1)"
            findings.append(Finding("unknown-key", WARNING, option, problem, "look it up in trtllm-serve --help"))
            words = words[1:] if words and not words[0].startswith("--") and not is_joined else words
        elif option in SWITCHES or (own and (not words or words[0].startswith("--")) and not is_joined):
            document = merged(document, nested(keys[option], True)) if keys[option] else document
        else:
            text = value if is_joined else words.pop(0) if words else ""
            if not keys[option]:
                continue
            if "$" in text:
                problem = f"{text} is known only to the shell that runs it"
                findings.append(
                    Finding("variable", UNCHECKED, keys[option], problem, "write its value, or set it in the script")
                )
            else:
                document = merged(document, nested(keys[option], yaml_document(text, script, ConfigError)))
    if isinstance(pool := document.get("kv_cache_config"), dict) and isinstance(named.get("kv_cache_config"), dict):
        named["kv_cache_config"] = pool | named["kv_cache_config"]
    document |= named
    for each in overrides:
        document = merged(document, each)
    return document, findings, is_whole


def file_words(words: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Each YAML file that a command names, with the position of its word, which `--config=FILE` shares."""
    for index, word in enumerate(words):
        option, is_joined, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and option.replace("-", "_") in FILES:
            if is_joined:
                yield index, value
            elif index + 1 < len(words):
                yield index + 1, words[index + 1]
