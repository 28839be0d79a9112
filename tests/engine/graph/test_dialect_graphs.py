# SPDX-License-Identifier: Apache-2.0
"""Drafts of every dialect: what is built of them computes what is known of each, written down here by hand.

The equations are float64 ones (`tests.reference`), their rules and factors none that the package has read.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from tests.checkpoint.dialect_samples import WRITERS, write_muse_glimmer
from tests.decoding import decode, greedy, open_without_tokenizer
from tests.engine.graph.test_parity import cache_of, compare_context, compare_draft, features
from tests.engines import Graphs, build
from tests.reference.dflash_float64 import AttentionRule, ReferenceDrafter, read_rotary
from tests.reference.synthetic import write_random_draft

D, H, V = 16, 48, 96
YARN = {"rope_type": "yarn", "factor": 128.0, "original_max_position_embeddings": 64, "rope_theta": 10000}


def rules(*layers: tuple[int | None, bool]) -> list[AttentionRule]:
    return [AttentionRule(window=window, causal=causal) for window, causal in layers]


TRUTH: dict[str, dict[str, Any]] = {
    "zlab": {"rules": rules(*[(None, False)] * 3)},
    "modelopt": {"rules": rules(*[(7, False)] * 3)},
    "nemotron": {"rules": rules(*[(None, False)] * 3), "rotary": read_rotary({"rope_parameters": YARN}, D)},
    "jetspec": {"rules": rules(*[(None, True)] * 3)},
    "speculators": {"rules": rules((7, True), (None, False), (7, True))},
    "speculators_vocabulary": {"rules": rules((7, True), (None, False), (7, True))},
    "laguna": {"rules": rules(*[(7, True)] * 3), "tap_norms": True, "context_input_layernorm": True, "gate": 4},
    "mimo": {
        "rules": rules(*[(7, False)] * 3), "value_scale": 0.612, "rotary_dim": 8,
        "rotary": read_rotary({"rope_theta": 1000000}, 8),
    },
    "muse_glimmer": {"rules": rules((8, False), (None, False), (8, False))},
}  # fmt: skip
QUICK = ("laguna", "mimo", "speculators")
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in TRUTH]


def reference_of(name: str, engine: Path, directory: Path) -> ReferenceDrafter:
    """The equations with the engine's tensors, on facts of `TRUTH`."""
    write_random_draft(directory, dialect="qwen3")
    shutil.copyfile(engine / "model.safetensors", directory / "model.safetensors")
    return ReferenceDrafter.load(directory, TRUTH[name])


@pytest.mark.parametrize("name", NAMES)
def test_graphs_of_each_dialect(name: str, tmp_path: Path) -> None:
    """Context of lengths on both sides of the window; a copy in our own layout gives the same graphs."""
    source = WRITERS[name](tmp_path / "draft")
    engine = tmp_path / "engine"
    build(source, engine)
    reference = reference_of(name, engine, tmp_path / "reference")
    graphs = Graphs(engine)
    for length in (1, 6, 7, 8, 9, 40):
        compare_context(graphs, reference, 0)
        compare_draft(graphs, reference, length)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of the samples' sizes."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=V, hidden_size=H, intermediate_size=80, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=D, max_position_embeddings=512, tie_word_embeddings=False,
        eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("target")
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.full
@pytest.mark.parametrize("name", TRUTH)
def test_each_dialect_is_quantised_built_and_generates_the_targets_text(
    name: str, tmp_path: Path, target: Path
) -> None:
    """The copy that `quantize` writes, in any layout, drafts the same tokens as the original."""
    from transformers import AutoModelForCausalLM

    source = WRITERS[name](tmp_path / "draft")
    quantize_checkpoint(read_draft(source), load_recipe("bf16"), tmp_path / "bf16")
    quantize_checkpoint(read_draft(source), load_recipe("fp8"), tmp_path / "fp8")
    prompt = [3, 14, 15, 92, 65, 35, 8, 9, 79, 3, 23, 84]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    plain = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :].tolist()
    proposed = {}
    for step in ("draft", "bf16", "fp8"):
        engine = tmp_path / f"engine-{step}"
        build(tmp_path / step, engine, target)
        request = decode(open_without_tokenizer(engine, target), prompt, greedy(20))
        assert request.token_ids == plain
        proposed[step] = [list(found.proposals) for found in request.steps]
    assert proposed["bf16"] == proposed["draft"]


@pytest.mark.full
@pytest.mark.parametrize("length", [1, 6, 7, 8, 9, 40])
def test_muse_glimmer_is_what_transformers_runs(length: int, tmp_path: Path) -> None:
    """An independent implementation, windows crossed: transformers' own model on the same file."""
    from transformers import MuseGlimmerAssistantModel

    source = write_muse_glimmer(tmp_path / "draft")
    build(source, tmp_path / "engine")
    graphs = Graphs(tmp_path / "engine")
    model = MuseGlimmerAssistantModel.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    taps = features(graphs, length)
    noise = np.random.default_rng(length).standard_normal((graphs.spec.block_size, H)).astype(np.float32)
    k, v = graphs.context(taps, np.arange(length))
    caches = cache_of(graphs, [k], length + 5), cache_of(graphs, [v], length + 5)
    ours = graphs.draft(noise[None], caches, [0], [length])[0]
    from transformers.cache_utils import DFlashCache

    cache = DFlashCache(config=model.config)
    cache.set_previous_accepted_tokens(length)
    with torch.no_grad():
        theirs = model(
            noise_embeds=torch.from_numpy(noise)[None],
            context_hidden_states=torch.from_numpy(taps)[None],
            past_key_values=cache,
        ).last_hidden_state[0]
    assert np.abs(ours - theirs.numpy()).max() < 2e-4 * np.abs(ours).max()
