# SPDX-License-Identifier: Apache-2.0
"""Findings about a launch command, by rule."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.deploy.checker import check
from dflash_trt.deploy.file_configs import file_configs
from dflash_trt.deploy.finding import Finding
from dflash_trt.deploy.gpus import parse_gpus
from dflash_trt.deploy.schema import load_schema


def found(command: str, rule: str, *, gpus: str | None = None) -> list[Finding]:
    """Findings of a rule about the command of a server that the first word names."""
    runtime = {"vllm": "vllm", "sglang": "sglang"}.get(command.split()[0], "trtllm")
    known = None if gpus is None else parse_gpus(gpus, "--gpus")
    (config,) = file_configs(Path("run.sh"), load_schema(runtime), text=command, gpus=known)
    return [finding for finding in check(config) if finding.rule == rule]


def vllm(draft: str, *, target: str = "Qwen/Qwen3-8B", method: str = "--speculative-config.method dflash") -> str:
    """A vLLM command with a draft."""
    section = f"{method} --speculative-config.model {draft} --speculative-config.num_speculative_tokens 5"
    return f"vllm serve {target} {section}"


def sglang(draft: str, *, target: str = "Qwen/Qwen3-8B", algorithm: str = "DFLASH") -> str:
    """An SGLang command with a draft."""
    draft = f"--speculative-algorithm {algorithm} --speculative-draft-model-path {draft}"
    return f"sglang serve --model-path {target} {draft}"
