# SPDX-License-Identifier: Apache-2.0
"""Speculators 0.9.0 itself loads the DFlash2 and DSpark drafts that `convert` writes; what it saves is read back."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.draft_spec import MarkovHead
from dflash_trt.engine.candidate_scorer import DraftedBlock, MarkovScorer
from tests.cli.commands import run_here
from tests.engines import build
from tests.paths import FIXTURES

pytestmark = pytest.mark.full

DRAFT, TARGET = FIXTURES / "tiny-qwen3-dflash2", FIXTURES / "tiny-qwen3"


@pytest.mark.skipif(
    find_spec("speculators") is None, reason="in an environment of its own: pip install speculators==0.9.0"
)
def test_what_convert_writes_loads_and_comes_back(tmp_path: Path) -> None:
    from speculators import SpeculatorModelConfig
    from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig

    written, saved = tmp_path / "written", tmp_path / "saved"
    run_here("convert", DRAFT, "-o", written, "--to", "speculators", "--target", TARGET)
    config = SpeculatorModelConfig.from_pretrained(str(written))
    assert isinstance(config, DFlash2SpeculatorConfig)
    assert (config.conv_kernel_size, config.conv_group_size) == (2, 16)
    assert (config.selector_rank, config.selector_top_k, config.block_size) == (32, 16, 8)
    assert (config.sliding_window_non_causal, config.aux_hidden_state_layer_ids) == (True, [1, 2, 3])
    model = DFlash2DraftModel.from_pretrained(str(written), config=config)
    ours, theirs = load_file(DRAFT / "model.safetensors"), model.state_dict()
    assert {name for name, tensor in ours.items() if torch.equal(tensor, theirs[name].to(tensor.dtype))} == set(ours)
    model.to(torch.bfloat16).save_pretrained(saved)
    before, after = read_draft(written), read_draft(saved)
    assert after.spec == before.spec
    assert after.weights.keys() == before.weights.keys()


@pytest.mark.skipif(
    find_spec("speculators") is None, reason="in an environment of its own: pip install speculators==0.9.0"
)
@pytest.mark.parametrize(
    ("head", "from_anchor", "num_rows"), [("vanilla", True, 96), ("gated", False, 96), ("vanilla", False, 40)]
)
def test_what_it_saves_is_read(head: str, from_anchor: bool, num_rows: int, tmp_path: Path) -> None:
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
    from transformers import Qwen3Config

    # It was written for transformers <= 5.19, whose configurations import torch at run time.
    DSparkSpeculatorConfig.model_rebuild(_types_namespace={"torch": torch})

    backbone = Qwen3Config(
        vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    config = DSparkSpeculatorConfig(
        transformer_layer_config=backbone, draft_vocab_size=num_rows, block_size=6, mask_token_id=95,
        aux_hidden_state_layer_ids=[2, 3, 4], markov_rank=12, markov_head_type=head, sample_from_anchor=from_anchor,
    )  # fmt: skip
    torch.manual_seed(0)
    model = DSparkDraftModel(config)
    tokens = torch.randperm(96)[:num_rows].sort().values
    if num_rows < 96:
        marked = torch.zeros(96, dtype=torch.bool)
        marked[tokens] = True
        model.load_vocab_mappings(marked, tokens - torch.arange(num_rows))
        torch.nn.init.normal_(model.lm_head.weight)  # not initialised in a smaller vocabulary
    model.save_pretrained(tmp_path / "draft")
    spec = read_draft(tmp_path / "draft").spec
    assert spec.markov_head == MarkovHead(
        rank=12, is_gated=head == "gated", confidence=True, num_rows=num_rows if num_rows < 96 else None
    )
    assert (spec.sample_from_anchor, spec.target_layer_ids) == (from_anchor, (1, 2, 3))
    build(tmp_path / "draft", tmp_path / "engine")
    scorer = MarkovScorer.read(tmp_path / "engine", spec, torch.device("cpu"))
    hidden, rows = torch.randn(1, 5, 48), torch.randint(num_rows, (1, 6))
    path = tokens[rows]
    with torch.inference_mode():
        bias = model.markov_head.block_bias(prev_token_ids=path[:, :-1], hidden_states=hidden)
        candidates = path[:, 1:, None]  # one in each slot, so that the path is known
        block = DraftedBlock(hidden, path[:, 0], None, torch.nn.Identity())
        lattice = scorer.lattice(block, candidates, torch.zeros(1, 5, 1))
    torch.testing.assert_close(lattice.scores[..., 0], bias.gather(2, rows[:, 1:, None]))
