# SPDX-License-Identifier: Apache-2.0
"""What speculators 0.9.0 itself saves of a DSpark draft is read, and its head gives the scores that ours does."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.draft_spec import MarkovHead
from dflash_trt.runtime.drafter.markov_head import MarkovScorer
from tests.engines import build


@pytest.mark.full
@pytest.mark.skipif(
    find_spec("speculators") is None, reason="in an environment of its own: pip install speculators==0.9.0"
)
@pytest.mark.parametrize(("head", "from_anchor"), [("vanilla", True), ("gated", False)])
def test_what_it_saves_is_read(head: str, from_anchor: bool, tmp_path: Path) -> None:
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
    from transformers import Qwen3Config

    # It was written for transformers <= 5.19, whose configurations import torch at run time.
    DSparkSpeculatorConfig.model_rebuild(_types_namespace={"torch": torch})

    backbone = Qwen3Config(
        vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    config = DSparkSpeculatorConfig(
        transformer_layer_config=backbone, draft_vocab_size=96, block_size=6, aux_hidden_state_layer_ids=[2, 3, 4],
        mask_token_id=95, markov_rank=12, markov_head_type=head, sample_from_anchor=from_anchor,
    )  # fmt: skip
    torch.manual_seed(0)
    model = DSparkDraftModel(config)
    model.save_pretrained(tmp_path / "draft")
    spec = read_draft(tmp_path / "draft").spec
    assert spec.markov_head == MarkovHead(rank=12, is_gated=head == "gated", confidence=True)
    assert (spec.sample_from_anchor, spec.target_layer_ids) == (from_anchor, (1, 2, 3))
    build(tmp_path / "draft", tmp_path / "engine")
    scorer = MarkovScorer.read(tmp_path / "engine", spec, torch.device("cpu"))
    hidden, tokens = torch.randn(1, 5, 48), torch.randint(96, (1, 6))
    with torch.inference_mode():
        bias = model.markov_head.block_bias(prev_token_ids=tokens[:, :-1], hidden_states=hidden)
        candidates = tokens[:, 1:, None]  # one in each slot, so that the path is known
        lattice = scorer.lattice(hidden, tokens[:, 0], candidates, torch.zeros(1, 5, 1))
    torch.testing.assert_close(lattice.scores[..., 0], bias.gather(2, candidates))
