# SPDX-License-Identifier: Apache-2.0
"""The loaders of vLLM 0.33.0 and SGLang 0.5.23, run on the files that `--check` reads."""

from __future__ import annotations

import argparse
import ast
import logging
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dflash_trt.deploy.foreign.argument_file import argument_words
from dflash_trt.deploy.schema import Schema, load_schema
from dflash_trt.deploy.vllm_speculation import inferred_method
from dflash_trt.errors import ConfigError
from dflash_trt.files.strict_yaml import yaml_document
from tests.deploy.wheels import SGLANG, VLLM, module, sources

pytestmark = pytest.mark.full

TEXTS = [
    "port: 1\nmax-num-seqs: '8'\ngpu-memory-utilization: 0.9\n",
    "enforce-eager: true\nno-enable-prefix-caching: true\n",
    "enforce-eager: false\ntrust-remote-code: false\n",
    "enable-prefix-caching: false\nno-enable-prefix-caching: false\n",
    "served-model-name: [a, b]\nlora-modules: []\n",
    "speculative-config: {method: dflash, num_speculative_tokens: 7, x: [1, null, true]}\n",
    'speculative-config: \'{"method": "dflash"}\'\nspeculative-config.model: d\n',
    "seed: null\nrevision: ''\n",
]

SGLANG_TEXTS = [
    "enable-metrics: true\ntp-size: 2\n",
    "disable-radix-cache: false\nport: 1\n",
    "cuda-graph-bs-decode: [1, 2]\n",
    "json-model-override-args: {a: 1}\n",
    "speculative-algorithm: DFLASH\nkv-cache-dtype: auto\n",
]
ARCHITECTURES = [
    "DFlashDraftModel", "Qwen3DSparkModel", "DSparkDraftModel", "Gemma4DSparkModel", "MuseGlimmerAssistantModel",
]  # fmt: skip


def files(tmp_path: Path) -> list[tuple[Path, dict[Any, Any]]]:
    written = []
    for number, text in enumerate(TEXTS):
        file = tmp_path / f"{number}.yaml"
        file.write_text(text)
        document = yaml_document(text, file, ConfigError)
        assert isinstance(document, dict)
        written.append((file, document))
    return written


def flags(schema: Schema) -> list[tuple[str, list[Any], Any]]:
    """Each argument with its types and default."""
    return [(f"--{name.replace('_', '-')}", kinds.get("type", []), kinds.get("default"))
            for name, kinds in schema.properties().items()]  # fmt: skip


def test_vllm(tmp_path: Path) -> None:
    """`vllm serve` asks its top-level parser, which has no flag of the server; the API server's module has them."""
    logger = ModuleType("vllm.logger")
    logger.init_logger = logging.getLogger  # type: ignore[attr-defined]
    stubs = {"vllm": ModuleType("vllm"), "vllm.logger": logger}
    file = sources(*VLLM) / "vllm/utils/argparse_utils.py"
    real = module("vllm.utils.argparse_utils", file, **stubs)
    schema = load_schema("vllm", VLLM[1])
    top, own = (real.FlexibleArgumentParser(add_help=False) for _ in range(2))
    for flag, kinds, _ in flags(schema):
        own.add_argument(flag, action=argparse.BooleanOptionalAction if "boolean" in kinds else "store")
    for path, document in files(tmp_path):
        for parser, is_subcommand in ((top, True), (own, False)):
            words, _ = argument_words(document, schema, name=path.name, is_subcommand=is_subcommand)
            assert words == parser.load_config_file(str(path))


def test_sglang(tmp_path: Path) -> None:
    real = module("merger", sources(*SGLANG) / "sglang/srt/utils/server_args_config_parser.py")
    schema = load_schema("sglang", SGLANG[1])
    parser = argparse.ArgumentParser(add_help=False)
    for flag, kinds, default in flags(schema):
        is_switch = "boolean" in kinds
        parser.add_argument(
            flag,
            action=("store" if not is_switch else "store_true" if default is False else argparse.BooleanOptionalAction),
        )
    merger = real.ConfigArgumentMerger(parser)
    for text in SGLANG_TEXTS:
        (tmp_path / "c.yaml").write_text(text)
        document = yaml_document(text, tmp_path / "c.yaml", ConfigError)
        assert isinstance(document, dict)
        words, findings = argument_words(document, schema, name="c.yaml")
        assert (words, findings) == (merger.merge_config_with_args(["--config", str(tmp_path / "c.yaml")]), [])
    (tmp_path / "c.yaml").write_text("enable-lora: true\n")
    with pytest.raises(ValueError, match="Unsupported config option 'enable_lora'"):
        merger.merge_config_with_args(["--config", str(tmp_path / "c.yaml")])
    assert [each.rule for each in argument_words({"enable-lora": True}, schema, name="c.yaml")[1]] == ["refused-key"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "path", ["a/b", "a/EAGLE-x", "a/eagle3-dflash", "z/Qwen3-DFlash", "d/dspark_7", "dflash/dspark"]
)
def test_the_method_that_vllm_infers(path: str, architecture: str) -> None:
    """The branch of SpeculativeConfig that detects a method, run on a path and an architecture."""
    tree = ast.parse((sources(*VLLM) / "vllm/config/speculative.py").read_text())
    wanted = "self.method in ('eagle', 'eagle3', 'dflash', 'dspark')"
    branch = next(node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == wanted)
    hf_config = SimpleNamespace(model_type="qwen3")
    draft = SimpleNamespace(model=path, architectures=[architecture], hf_config=hf_config)
    config = SimpleNamespace(method="draft_model", draft_model_config=draft, num_speculative_tokens=7)
    names = {"self": config, "using_transformers_mtp": False, "MTPModelTypes": (), "get_args": tuple,
             "_QWEN3_OMNI_DSPARK_ARCHITECTURE": "", "_MUSE_SPARK_DSPARK_ARCHITECTURE": ""}  # fmt: skip
    exec(compile(ast.fix_missing_locations(ast.Module([branch], [])), "speculative", "exec"), names)
    assert inferred_method({"model": path}, [architecture]) == config.method
