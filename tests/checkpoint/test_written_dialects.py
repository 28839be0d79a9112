# SPDX-License-Identifier: Apache-2.0
"""vLLM and the package speculators read the drafts that we write, with their own code (full tests)."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dflash_trt.checkpoint.convert_dialect import Verifier, convert_dialect
from dflash_trt.checkpoint.dialects.layouts import LAYOUTS
from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, read_draft
from tests.checkpoint.dialect_samples import write_speculators, write_speculators_vocabulary
from tests.checkpoint.samples import edit_config
from tests.checkpoint.test_convert_dialect import SOME_SLIDING, to
from tests.paths import FIXTURES
from tests.reference.synthetic import write_random_draft

pytestmark = pytest.mark.full

VLLM_CAUSAL = """
import ast, importlib.util, json, pathlib, sys, types
root = pathlib.Path(importlib.util.find_spec("vllm").origin).parent  # nothing of it is imported: it needs a GPU's build
algos = {"__name__": "algos"}
exec((root / "transformers_utils/configs/speculators/algos.py").read_text(), algos)
config = json.loads(pathlib.Path(sys.argv[1], "config.json").read_text())
theirs = dict(config["transformer_layer_config"])
algos["SUPPORTED_SPECULATORS_TYPES"][config["speculators_model_type"]](config_dict=config, pre_trained_config=theirs)
tree = ast.parse((root / "model_executor/models/qwen3_dflash.py").read_text())
rule = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "_dflash_layer_causal")
scope = {"Qwen3Config": object, "_SLIDING_ATTENTION": "sliding_attention"}
exec(compile(ast.Module([rule], []), "qwen3_dflash.py", "exec"), scope)
layers = range(theirs["num_hidden_layers"])
causal = [scope[rule.name](types.SimpleNamespace(**theirs), i) for i in layers]
print(json.dumps({"causal": causal, "config": theirs}))
"""


def as_vllm_reads(directory: Path) -> dict[str, Any]:
    """By vLLM's own code: how it maps a Speculators config, and what it then reads of each layer."""
    process = [sys.executable, "-c", VLLM_CAUSAL, str(directory)]
    found: dict[str, Any] = json.loads(subprocess.run(process, capture_output=True, text=True, check=True).stdout)
    return found


has_vllm = pytest.mark.skipif(
    find_spec("vllm") is None, reason="where PYTHONPATH has it: pip install --no-deps vllm==0.33.0"
)
WINDOWS = [(None, None), (["sliding_attention"] * 3, False), (["sliding_attention"] * 3, True), (SOME_SLIDING, False)]


@has_vllm
@pytest.mark.parametrize(("types", "is_causal"), WINDOWS)
def test_vllm_computes_the_same_causality(types: list[str] | None, is_causal: bool | None, tmp_path: Path) -> None:
    directory = write_random_draft(
        tmp_path / "draft", dialect="qwen3", layer_types=types, sliding_window=9, is_causal=is_causal
    )
    written = to(directory, "speculators", tmp_path / "written")
    assert as_vllm_reads(tmp_path / "written")["causal"] == [layer.causal for layer in written.spec.layers]


@has_vllm
@pytest.mark.parametrize("types", [None, SOME_SLIDING, ["sliding_attention"] * 3])
@pytest.mark.parametrize("from_anchor", [True, False])
def test_vllm_reads_a_dspark_draft_as_we_do(from_anchor: bool, types: list[str] | None, tmp_path: Path) -> None:
    directory = write_random_draft(
        tmp_path / "draft", dialect="qwen3", dspark="vanilla", layer_types=types, sliding_window=9
    )
    spec = to(edit_config(directory, sample_from_anchor=from_anchor), "speculators", tmp_path / "written").spec
    found = as_vllm_reads(tmp_path / "written")
    assert found["causal"] == [layer.causal for layer in spec.layers]
    config, head = found["config"], spec.markov_head
    assert head is not None
    expected = {
        "architectures": ["Qwen3DSparkModel"], "sample_from_anchor": from_anchor,
        "dspark_bonus_anchor": not from_anchor, "target_layer_ids": list(spec.target_layer_ids),
        "block_size": spec.block_size, "mask_token_id": spec.mask_token_id, "markov_rank": head.rank,
        "markov_head_type": "vanilla", "enable_confidence_head": head.confidence,
        "confidence_head_with_markov": head.confidence, "draft_vocab_size": spec.vocab_size,
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected


LOAD = """
import json, sys, torch
from safetensors.torch import load_file, save_file
from speculators.models.dflash import DFlashDraftModel
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
DSparkSpeculatorConfig.model_rebuild(_types_namespace={"torch": torch})  # transformers > 5.19
kind = json.load(open(sys.argv[1] + "/config.json"))["speculators_model_type"]
model = (DSparkDraftModel if kind == "dspark" else DFlashDraftModel).from_pretrained(sys.argv[1])
stored = load_file(sys.argv[1] + "/model.safetensors")
state = model.state_dict()
stored.pop("embed_tokens.weight", None)  # speculators 0.9 puts the target's in its place, always
wrong = [n for n, t in stored.items() if not torch.equal(state[n].to(t.dtype), t)]
layers = model.config.transformer_layer_config
print(json.dumps({
    "wrong": wrong, "ids": model.target_layer_ids, "block_size": model.block_size, "mask": model.config.mask_token_id,
    "windows": model.sliding_window_indices, "non_causal": model.sliding_window_non_causal,
    "biases": layers.attention_bias, "rope": model.rotary_emb.attention_scaling,
    "from_anchor": model.config.sample_from_anchor, "rank": getattr(model.config, "markov_rank", 0),
}))
"""


def write_verifier(path: Path, draft: DraftCheckpoint) -> Path:
    """Tensors of a target that the package loads with every draft: embedding, norm and lm_head."""
    path.mkdir()
    size = (draft.spec.vocab_size or 0, draft.spec.hidden_size)
    config = {"model_type": "qwen3", "hidden_size": size[1], "vocab_size": size[0]}
    config["architectures"] = ["Qwen3ForCausalLM"]
    (path / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": size, "lm_head.weight": size, "model.norm.weight": size[1:]}
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, path / "model.safetensors")
    index = {"weight_map": dict.fromkeys(shapes, "model.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def speculators_python() -> Path | None:
    """An interpreter that has the package: this one, or one that SPECULATORS_PYTHON names."""
    import importlib.util
    import os

    named = os.environ.get("SPECULATORS_PYTHON")
    return Path(named) if named else Path(sys.executable) if importlib.util.find_spec("speculators") else None


@pytest.mark.skipif(speculators_python() is None, reason="needs speculators, here or in SPECULATORS_PYTHON")
@pytest.mark.parametrize("case", ["tiny-qwen3-dflash", "tiny-gpt-oss-dflash", "windows", "vocabulary", "dspark"])
def test_the_speculators_package_reads_what_we_write(case: str, tmp_path: Path) -> None:
    """Every tensor of ours is in its model, and its facts are the draft's."""
    writers: dict[str, Callable[[Path], Path]] = {
        "windows": lambda path: write_speculators(path, sliding_window_non_causal=True),
        "vocabulary": lambda path: edit_config(write_speculators_vocabulary(path), sliding_window_non_causal=True),
        "dspark": lambda path: write_random_draft(path, dialect="qwen3", dspark="gated"),
    }
    source = writers[case](tmp_path / "source") if case in writers else FIXTURES / case
    draft = read_draft(source)
    verifier = Verifier(name=str(write_verifier(tmp_path / "target", draft)), architectures=["Qwen3ForCausalLM"])
    convert_dialect(draft, LAYOUTS["speculators"], tmp_path / "draft", verifier=verifier)
    process = [str(speculators_python()), "-c", LOAD, str(tmp_path / "draft")]
    result = subprocess.run(process, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    spec = draft.spec
    assert found == {
        "wrong": [], "ids": [tap + 1 for tap in spec.target_layer_ids], "block_size": spec.block_size,
        "mask": spec.mask_token_id, "windows": [i for i, layer in enumerate(spec.layers) if layer.sliding_window],
        "non_causal": True, "biases": spec.attention_bias, "rope": pytest.approx(spec.rope.attention_factor),
        "from_anchor": spec.sample_from_anchor, "rank": 0 if spec.markov_head is None else spec.markov_head.rank,
    }  # fmt: skip
