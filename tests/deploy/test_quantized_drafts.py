# SPDX-License-Identifier: Apache-2.0
"""Formats of quantised drafts by runtime and GPU: the readers of vLLM and SGLang, the rule, and the page."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dflash_trt.checkpoint.number_formats import FP8, INT4, NVFP4, W4A16_NVFP4
from dflash_trt.deploy.checker import check
from dflash_trt.deploy.file_configs import file_configs
from dflash_trt.deploy.finding import ERROR, UNCHECKED, WARNING, Finding
from dflash_trt.deploy.gpus import parse_gpus
from dflash_trt.deploy.rules.quantized_rules import MIXED, READERS, unread
from dflash_trt.deploy.schema import load_schema
from tests.deploy.rules.commands import sglang, vllm
from tests.deploy.wheels import SGLANG, VLLM, definitions, sources
from tools.quantization_page import PAGE, replaced, table

DRAFT = "z-lab/Qwen3-8B-DFlash-b16"
MODULES = ("layers.0.mlp.up_proj", "layers.0.self_attn.o_proj")


def findings(runtime: str, formats: tuple[str, ...], gpus: str | None, rule: str = "quantized-draft") -> list[Finding]:
    """Findings about a draft whose layers have these formats."""
    text = {"vllm": vllm, "sglang": sglang}[runtime](DRAFT)
    known = None if gpus is None else parse_gpus(gpus, "--gpus")
    (config,) = file_configs(Path("run.sh"), load_schema(runtime), text=text, gpus=known)
    served = msgspec.structs.replace(config.served, algorithms=dict(zip(MODULES, formats, strict=False)))
    found = check(msgspec.structs.replace(config, served=served))
    return [finding for finding in found if finding.rule == rule]


@pytest.mark.parametrize(
    ("runtime", "formats", "gpus", "severities"),
    [
        ("vllm", (INT4,), "b200x1", [ERROR]),
        ("sglang", (INT4,), None, [ERROR]),
        ("vllm", (NVFP4, INT4), "b200x1", [ERROR]),
        ("vllm", (NVFP4,), "b200x1", []),
        ("vllm", (NVFP4,), "h200x1", [WARNING]),
        ("sglang", (NVFP4,), "h200x1", [WARNING]),
        ("sglang", (NVFP4, FP8), "rtx5090x1", []),
        ("vllm", (FP8,), "a100x1", [WARNING]),
        ("sglang", (FP8,), "a100x1", [ERROR]),
        ("vllm", (W4A16_NVFP4,), "a100x1", []),
        ("vllm", (NVFP4,), None, [UNCHECKED]),
        ("vllm", (), "h200x1", []),
    ],
)
def test_the_rule(runtime: str, formats: tuple[str, ...], gpus: str | None, severities: list[str]) -> None:
    assert [finding.severity for finding in findings(runtime, formats, gpus)] == severities


def test_what_does_not_load_costs_no_projection() -> None:
    attention = ("layers.0.self_attn.q_proj",)
    (config,) = file_configs(Path("run.sh"), load_schema("vllm"), text=vllm(DRAFT))
    for formats, is_found in ((INT4, False), (NVFP4, True)):
        served = msgspec.structs.replace(config.served, algorithms=dict.fromkeys(attention, formats))
        found = check(msgspec.structs.replace(config, served=served))
        assert any(finding.rule == "quantized-context" for finding in found) == is_found


def test_the_page_is_in_step_with_the_code() -> None:
    """After a wanted change: python -m tools.quantization_page"""
    page = PAGE.read_text()
    assert replaced(page) == page
    assert table() in page


@pytest.mark.full
def test_the_reader_of_vllm() -> None:
    file = sources(*VLLM) / "vllm/model_executor/layers/quantization/modelopt.py"
    namespace: dict[str, Any] = {"ModelOptQuantConfigBase": object, "classmethod": classmethod}
    names = {FP8: "ModelOptFp8Config", NVFP4: "ModelOptNvFp4Config", MIXED: "ModelOptMixedPrecisionConfig"}
    definitions(file, ["LINEAR_ALGOS", "QUANT_ALGOS"], namespace)
    definitions(file, names.values(), namespace, methods=["get_min_capability"])
    reader = READERS["vllm"]
    for algorithm in (FP8, NVFP4, W4A16_NVFP4, INT4, MIXED):
        assert (algorithm in namespace["QUANT_ALGOS"]) == (algorithm in reader.lowest)
    for algorithm, name in names.items():
        assert divmod(namespace[name].get_min_capability(), 10) == reader.lowest[algorithm]
    assert namespace["LINEAR_ALGOS"][W4A16_NVFP4][0] == namespace["LINEAR_ALGOS"][NVFP4][0]


@pytest.mark.full
def test_the_reader_of_sglang() -> None:
    package = sources(*SGLANG) / "sglang/srt"
    namespace: dict[str, Any] = {"logger": logging.getLogger("sglang"), "ModelOptQuantConfig": object}
    definitions(package / "configs/model_config.py", ["unwrap_modelopt_quantization_config"], namespace)
    definitions(package / "configs/model_config.py", ["ModelConfig"], namespace, methods=["_parse_modelopt"])
    classes = ["ModelOptFp8Config", "ModelOptFp4Config", "ModelOptMixedPrecisionConfig"]
    definitions(package / "layers/quantization/modelopt_quant.py", classes, namespace, methods=["get_min_capability"])
    parse = namespace["ModelConfig"]._parse_modelopt_quant_config
    kinds = {"modelopt_fp8": classes[0], "modelopt_fp4": classes[1], "modelopt_mixed": classes[2]}
    for formats in ((FP8,), (NVFP4,), (W4A16_NVFP4,), (INT4,), (FP8, NVFP4)):
        layers = {str(index): {"quant_algo": each} for index, each in enumerate(formats)}
        config = {"quant_method": "modelopt", "quant_algo": formats[0]}
        config |= {"quant_algo": MIXED, "quantized_layers": layers} if len(formats) > 1 else {}
        read = parse(SimpleNamespace(), config)
        name = kinds.get((read or {}).get("quant_method", ""))
        assert (name is None) == (unread("sglang", formats) is not None), (formats, read)
        if name is not None:
            kind = MIXED if len(formats) > 1 else formats[0]
            assert divmod(namespace[name].get_min_capability(), 10) == READERS["sglang"].lowest[kind]
